// Tells Python of collectives, and of what the host of a GPU would wait for.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <set>
#include <string>

namespace simgpu {

inline std::atomic<PyObject*> g_observer{nullptr};  // a callable (event, bytes, name of the process group)

inline void observe(const std::string& event, int64_t bytes = 0, const std::string& group = "") {
  if (!g_observer.load()) return;
  const pybind11::gil_scoped_acquire gil;
  if (auto* observer = g_observer.load()) pybind11::reinterpret_borrow<pybind11::object>(observer)(event, bytes, group);
}

inline int64_t bytes_of(const c10::IValue& value) {  // of a tensor, or of all within lists
  if (value.isTensor()) return value.toTensor().defined() ? value.toTensor().nbytes() : 0;
  int64_t bytes = 0;
  if (value.isList())
    for (const c10::IValue& each : value.toListRef()) bytes += bytes_of(each);
  return bytes;
}

// Every operator of c10d, of the device's tensors and the host's. Its bytes are those of the largest argument: of an
// all-gather what comes, of a reduce-scatter what is given.
inline std::unique_ptr<at::ObserverContext> observe_collective(const at::RecordFunction& call) {
  const std::string name = call.name();
  if (name.rfind("c10d::", 0) != 0) return nullptr;
  int64_t bytes = 0;
  std::string group;
  for (const c10::IValue& argument : call.inputs()) {
    bytes = std::max(bytes, bytes_of(argument));
    if (argument.isObject() && argument.toObject()->type()->name()->qualifiedName().ends_with(".ProcessGroup"))
      group = argument.toCustomClass<c10d::ProcessGroup>()->getGroupName();
  }
  observe(name, bytes, group);
  return nullptr;
}

// Operators whose result has a shape that only the device knows, or that are a number of the host: CUDA waits in them.
inline bool waits(const std::string& name, const torch::jit::Stack& stack, size_t first) {
  static const std::set<std::string> names = {
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::unique_dim_consecutive", "aten::bincount", "aten::equal"};
  if (names.count(name)) return true;
  if (name == "aten::repeat_interleave") return stack.back().isNone();  // output_size is not given
  if (name.find("index") == std::string::npos || stack.size() - first < 2 || !stack[first + 1].isList()) return false;
  for (const c10::IValue& index : stack[first + 1].toListRef()) {
    if (!index.isTensor() || !index.toTensor().defined()) continue;
    const auto& tensor = index.toTensor();
    if (tensor.is_cpu() || tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte) return true;
  }
  return false;
}

inline void set_observer(const pybind11::object& observer) {
  static at::CallbackHandle handle = 0;
  if (auto* before = g_observer.exchange(nullptr)) {
    at::removeCallback(handle);
    Py_DECREF(before);
  }
  if (observer.is_none()) return;
  handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&observe_collective).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  g_observer = observer.inc_ref().ptr();
}

}  // namespace simgpu
