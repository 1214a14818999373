// Without data: floating-point memory is address space that is never touched, and reads as zeros.
//
// An operator that reads or writes such tensors is skipped: the shapes of its results come from torch's meta kernels,
// and the allocator counts them as always. Integers, masks and small fp64 tensors are real; where they follow from
// floating-point values they are computed from zeros, up to kComputed elements, and are zeros beyond that. Large
// floating-point tensors of the host (weights before they are placed, offloaded states) are treated alike.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <set>

#include "aliases.h"

namespace simgpu {

using c10::IValue;
using torch::jit::Stack;
constexpr int64_t kComputed = 1 << 20;

inline bool is_without_data(const Tensor& tensor) {
  if (!g_without_data || !tensor.defined() || !(tensor.is_floating_point() || tensor.is_complex())) return false;
  if (!tensor.is_privateuseone() && !tensor.is_cpu()) return false;
  if (tensor.layout() != c10::kStrided) return false;
  return tensor.nbytes() >= kLarge || (tensor.is_privateuseone() && tensor.scalar_type() != at::kDouble);
}

// Applies `change` to every tensor within a value: a tensor, a list, or (collectives have them) a list of lists.
template <typename Change>
void map_tensors(IValue& value, const Change& change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) made.push_back(change(tensor));
    value = made;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      made.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    value = made;
  } else if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
    c10::List<c10::List<Tensor>> made;
    for (const IValue& each : value.toListRef()) {
      c10::List<Tensor> inner;
      for (const Tensor& tensor : each.toTensorVector()) inner.push_back(change(tensor));
      made.push_back(inner);
    }
    value = made;
  }
}

// ------------------------------------------------------------------------------------------- shapes from a meta kernel

struct Shape {  // of a result: an argument itself, a view of one, or new memory
  bool is_defined = false, is_view = false, has_numbers = false;  // numbers: integers or a mask
  int64_t given = -1, storage = -1;  // which argument; which of the new storages
  size_t nbytes = 0;  // of the storage
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;
};

struct Shapes {  // of all results of a call; the same for every call with arguments of these shapes
  bool fails = false;  // there is no meta kernel, or the shape depends on data
  bool has_numbers = false;
  std::vector<std::pair<bool, std::vector<Shape>>> results;  // (whether it is a list, its tensors)
};

// One call of a meta kernel, on meta tensors of the arguments' geometry.
class MetaCall {
 public:
  Tensor to_meta(const Tensor& tensor) {
    const bool stays = !tensor.defined() || tensor.is_meta() || tensor.unsafeGetTensorImpl()->is_wrapped_number();
    auto made = stays ? tensor : make(tensor);
    given_.push_back(made);
    return made;
  }

  Shape shape_of(const Tensor& result) {
    Shape shape;
    if (!result.defined()) return shape;
    shape.is_defined = true;
    shape.has_numbers = !(result.is_floating_point() || result.is_complex());
    shape.sizes = result.sizes().vec();
    shape.strides = result.strides().vec();
    shape.offset = result.storage_offset();
    shape.dtype = result.dtype();
    shape.nbytes = result.storage().nbytes();
    auto* own = result.storage().unsafeGetStorageImpl();
    for (size_t i = 0; i < given_.size(); ++i) {
      if (!given_[i].defined() || given_[i].storage().unsafeGetStorageImpl() != own) continue;
      shape.given = static_cast<int64_t>(i);
      shape.is_view = !given_[i].is_same(result);
      if (!shape.is_view) return shape;
    }
    if (shape.given < 0) shape.storage = static_cast<int64_t>(fresh_.emplace(own, fresh_.size()).first->second);
    return shape;
  }

 private:
  Tensor make(const Tensor& tensor) {
    auto* own = tensor.storage().unsafeGetStorageImpl();
    auto found = to_meta_.find(own);
    if (found == to_meta_.end()) {
      Storage storage(c10::make_intrusive<StorageImpl>(
          StorageImpl::use_byte_size_t(), own->nbytes(), DataPtr(nullptr, Device(c10::kMeta)),
          c10::GetAllocator(c10::kMeta), /*resizable=*/true));
      found = to_meta_.emplace(own, std::move(storage)).first;
    }
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::Meta), tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return made;
  }

  std::unordered_map<StorageImpl*, Storage> to_meta_;
  std::unordered_map<StorageImpl*, size_t> fresh_;
  std::vector<Tensor> given_;
};

// Tensors of these shapes, on the device or the host: what is new is zeros, of which large memory is not touched.
class Results {
 public:
  Results(Device device, std::vector<Tensor> given) : device_(device), given_(std::move(given)) {}

  Tensor make(const Shape& shape) {
    if (!shape.is_defined) return Tensor();
    if (shape.given >= 0 && !shape.is_view) {
      const auto& own = given_[shape.given];
      if (own.sizes() != shape.sizes || own.strides() != shape.strides) {  // resized, as `out` may be
        own.resize_(shape.sizes);
        own.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides, shape.offset);
      }
      return own;
    }
    const auto key = device_.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::PrivateUse1;
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        shape.is_view ? Storage(given_[shape.given].storage()) : memory_of(shape), c10::DispatchKeySet(key),
        shape.dtype);
    made.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides, shape.offset);
    return made;
  }

 private:
  Storage memory_of(const Shape& shape) {
    auto found = fresh_.find(shape.storage);
    if (found == fresh_.end()) {
      auto* allocator = device_.is_cpu() ? c10::GetCPUAllocator() : static_cast<c10::Allocator*>(&g_allocator);
      auto memory = allocator->allocate(shape.nbytes);
      if (device_.is_cpu() && shape.nbytes > 0 && shape.nbytes < kLarge)
        std::memset(memory.get(), 0, shape.nbytes);
      Storage storage(c10::make_intrusive<StorageImpl>(
          StorageImpl::use_byte_size_t(), shape.nbytes, std::move(memory), allocator, /*resizable=*/true));
      found = fresh_.emplace(shape.storage, std::move(storage)).first;
    }
    return found->second;
  }

  Device device_;
  std::vector<Tensor> given_;
  std::unordered_map<int64_t, Storage> fresh_;
};

// ------------------------------------------------------------------------------------------------- operators, skipped

// What decides about a call. The key is the operator and all that its results' shapes depend on; empty: not known.
struct Call {
  bool without_data = false;
  int64_t elements = 0;  // of the largest tensor
  std::optional<Device> device;
  std::vector<Tensor> tensors;
  std::string key;

  template <typename T>
  void add(const T& value) { key.append(reinterpret_cast<const char*>(&value), sizeof(T)); }

  void add_tensor(const Tensor& tensor) {
    tensors.push_back(tensor);
    if (!tensor.defined()) return add('U');
    without_data = without_data || is_without_data(tensor);
    elements = std::max(elements, tensor.numel());
    if (tensor.is_privateuseone() && !device) device = tensor.device();
    add('T');
    add(static_cast<int8_t>(tensor.scalar_type()));
    add(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    add(tensor.dim());
    for (const auto size : tensor.sizes()) add(size);
    for (const auto stride : tensor.strides()) add(stride);
    add(tensor.storage_offset());
  }

  bool add_value(const IValue& value) {  // returns false where it is of a kind that the key has no place for
    if (value.isTensor()) return add_tensor(value.toTensor()), true;
    if (value.isNone()) return add('N'), true;
    if (value.isInt()) return add('I'), add(value.toInt()), true;
    if (value.isDouble()) return add('D'), add(value.toDouble()), true;
    if (value.isBool()) return add('B'), add(value.toBool()), true;
    if (value.isDevice() || value.isGenerator()) return add('d'), true;
    if (value.isString()) return add('s'), key.append(value.toStringRef()), add('\0'), true;
    if (!value.isList()) return false;
    add('[');
    bool is_known = true;
    for (const IValue& each : value.toListRef()) is_known = add_value(each) && is_known;
    add(']');
    return is_known;
  }
};

inline Call look_at(const c10::OperatorHandle& op, const Stack& stack, size_t first) {
  Call call;
  call.add(&op.schema());
  bool is_known = true;
  for (auto i = first; i < stack.size(); ++i) is_known = call.add_value(stack[i]) && is_known;
  if (!is_known) call.key.clear();
  return call;
}

inline Shapes shapes_from_meta(const c10::OperatorHandle& op, const Stack& stack, size_t first) {
  MetaCall meta;
  Shapes shapes;
  Stack on_meta(stack.begin() + first, stack.end());
  for (auto& value : on_meta) {
    map_tensors(value, [&](const Tensor& tensor) { return meta.to_meta(tensor); });
    if (value.isDevice()) value = Device(c10::kMeta);
    if (value.isGenerator()) value = IValue();
  }
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &on_meta);
  } catch (const std::exception&) {
    shapes.fails = true;
    return shapes;
  }
  for (auto& value : on_meta) {
    auto& [is_list, found] = shapes.results.emplace_back(!value.isTensor(), std::vector<Shape>());
    map_tensors(value, [&, &found = found](const Tensor& tensor) {
      found.push_back(meta.shape_of(tensor));
      shapes.has_numbers = shapes.has_numbers || found.back().has_numbers;
      return tensor;
    });
  }
  return shapes;
}

inline const Shapes& shapes_of(const c10::OperatorHandle& op, const Stack& stack, size_t first, const Call& call) {
  static std::mutex mutex;
  static std::unordered_map<std::string, Shapes> known;
  static thread_local Shapes unknown;
  if (call.key.empty()) return unknown = shapes_from_meta(op, stack, first);
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = known.find(call.key); found != known.end()) return found->second;
  }
  auto shapes = shapes_from_meta(op, stack, first);  // without the lock: Python's may be waited for
  std::lock_guard<std::mutex> lock(mutex);
  return known.emplace(call.key, std::move(shapes)).first->second;
}

// Whether the value of a mask is True where the numbers that it is made of are zeros.
inline bool is_true_of_zeros(const c10::OperatorHandle& op, const Stack& given, size_t first) {
  static const std::set<std::string> elementwise = {"aten::eq", "aten::ne", "aten::ge",         "aten::gt",
                                                    "aten::le", "aten::lt", "aten::logical_not"};
  if (!elementwise.count(op.operator_name().name)) return false;
  Stack stack(given.begin() + first, given.end());
  for (auto& value : stack)
    map_tensors(value, [](const Tensor& tensor) {
      return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor
                                                               : at::zeros({}, tensor.options().device(c10::kCPU));
    });
  op.callBoxed(&stack);
  return stack.back().toTensor().item<bool>();
}

// Skips an operator on tensors without data: pops its arguments, pushes its results. Returns false, the stack as it
// was, where it has to be computed.
inline bool skip(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto &arguments = schema.arguments(), &returns = schema.returns();
  const auto first = stack->size() - arguments.size();
  const auto call = look_at(op, *stack, first);
  if (!call.without_data) return false;
  bool is_view = false, all_tensors = true;
  for (const auto& result : returns) {
    is_view = is_view || (result.alias_info() && !result.alias_info()->isWrite());
    const auto kind = result.type()->kind();
    all_tensors = all_tensors && (kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType);
  }
  if (is_view || !all_tensors) return false;  // data is not touched, or a number is asked for
  if (op.hasTag(at::Tag::inplace_view) || op.operator_name().name == "aten::_resize_output_") return false;
  if (returns.empty()) {
    torch::jit::drop(stack, arguments.size());
    return true;
  }
  const auto *own = arguments.empty() ? nullptr : arguments[0].alias_info(), *back = returns[0].alias_info();
  if (returns.size() == 1 && own && back && own->isWrite() && own->beforeSets() == back->beforeSets()) {  // in place
    const auto self = (*stack)[first];
    if (self.isTensor() && !is_without_data(self.toTensor()) && call.elements <= kComputed) return false;
    torch::jit::drop(stack, arguments.size());
    stack->push_back(self);
    return true;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  const auto device = call.device.value_or(Device(c10::kCPU));
  const auto& shapes = shapes_of(op, *stack, first, call);
  if (shapes.fails || (shapes.has_numbers && call.elements <= kComputed)) return false;
  const bool is_true = shapes.has_numbers && returns.size() == 1 && is_true_of_zeros(op, *stack, first);
  const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::optional<Device>(device));
  Results results(device, call.tensors);
  torch::jit::drop(stack, arguments.size());
  for (const auto& [is_list, found] : shapes.results) {
    if (!is_list) {
      stack->emplace_back(results.make(found.at(0)));
      continue;
    }
    c10::List<Tensor> made;
    for (const auto& shape : found) made.push_back(results.make(shape));
    stack->emplace_back(std::move(made));
  }
  if (is_true) std::memset(stack->back().toTensor().data_ptr(), 1, stack->back().toTensor().nbytes());
  return true;
}

// ---------------------------------------------------------------------------------------------- collectives, skipped

// Of a collective that has moved nothing. Until it is waited for it holds the tensors, as those of gloo and NCCL do.
struct DoneWork final : c10d::Work {
  DoneWork(std::vector<Tensor> tensors, std::vector<Tensor> held)
      : tensors_(std::move(tensors)), held_(std::move(held)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    held_.clear();
    return true;
  }
  void synchronize() override {}
  std::vector<Tensor> result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(IValue(tensors_));
    return future;
  }

 private:
  std::vector<Tensor> tensors_, held_;
};

// As `skip`, for an operator of c10d: what it returns is its first argument, and a Work.
inline bool skip_collective(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto first = stack->size() - schema.arguments().size();
  if (!look_at(op, *stack, first).without_data) return false;
  std::vector<Tensor> tensors, held;
  IValue result = (*stack)[first];
  map_tensors(result, [&](const Tensor& tensor) { return tensors.emplace_back(tensor); });
  for (auto at = first; at < stack->size(); ++at)
    map_tensors((*stack)[at], [&](const Tensor& tensor) { return held.emplace_back(tensor); });
  torch::jit::drop(stack, schema.arguments().size());
  for (const auto& returned : schema.returns()) {
    if (returned.type()->kind() == c10::TypeKind::ClassType)
      stack->push_back(IValue(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<DoneWork>(tensors, held))));
    else
      stack->push_back(result);
  }
  return true;
}

// -------------------------------------------------------------------------------------------- large tensors of the host

struct OnHost final : c10::OperatorKernel {  // in place of the CPU's kernel of an operator
  explicit OnHost(c10::SafeKernelFunction kernel) : kernel_(std::move(kernel)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (!skip(op, stack)) kernel_.callBoxed(op, keys, stack);
  }

 private:
  c10::SafeKernelFunction kernel_;
};

struct HostAllocator final : c10::Allocator {  // of the CPU: what is large is not touched
  explicit HostAllocator(c10::Allocator* before) : before_(before) {}
  DataPtr allocate(size_t size) override {
    return size < kLarge ? before_->allocate(size) : untouched(size, /*is_host=*/true);
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }

 private:
  c10::Allocator* before_;
};

inline void skip_on_the_host() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !(op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || toString(name) == "aten::copy_")) continue;
    auto kernel = op->getComputedKernelForDispatchKey(c10::DispatchKey::CPU);
    library.impl(
        toString(name).c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<OnHost>(std::move(kernel))));
  }
  c10::SetCPUAllocator(new HostAllocator(c10::GetCPUAllocator()), /*priority=*/100);
}

}  // namespace simgpu
