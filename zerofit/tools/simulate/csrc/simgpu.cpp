// A simulated accelerator for PyTorch (PrivateUse1): host memory that is counted and limited as a GPU's, CPU kernels.
//
// Device tensors lie in ordinary host memory. Every operator without a kernel of its own here is run by the CPU's kernel
// on CPU tensors that alias the same memory, without copies; what it allocates for results becomes device memory. So
// the results are the CPU's, bit for bit; tensors of two devices cannot be mixed; and the allocator's figures are exact:
// the same program has the same figures in every run. without_data.h is a mode in which nothing is computed.
#include <ATen/autocast_mode.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <set>

#include "aliases.h"
#include "device.h"
#include "observe.h"
#include "without_data.h"

namespace simgpu {

REGISTER_ALLOCATOR(kDeviceType, &g_allocator);
REGISTER_HOST_ALLOCATOR(kDeviceType, &g_pinned_allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

// ------------------------------------------------------------------------------------------ the CPU's kernel of anything

// Operators that draw without being given a generator draw from the CPU's; for the call, that has the device's state.
class BorrowedRandomState {
 public:
  explicit BorrowedRandomState(at::Generator& device) : device_(device), before_(cpu().get_state()) {
    cpu().set_state(device_.get_state());
  }
  ~BorrowedRandomState() {
    device_.set_state(cpu().get_state());
    cpu().set_state(before_);
  }

 private:
  static at::Generator& cpu() { return const_cast<at::Generator&>(at::detail::getDefaultCPUGenerator()); }
  at::Generator& device_;
  Tensor before_;
};

void check_devices(const std::string& name, const Aliases& call, const IValue& first) {
  static const std::set<std::string> indexing = {"aten::index", "aten::index_put", "aten::index_put_",
                                                 "aten::_index_put_impl_", "aten::_unsafe_index", "aten::set_"};
  if (!call.has_device_tensors()) return;
  if (indexing.count(name)) {  // as on CUDA, indices may lie on the CPU
    TORCH_CHECK(
        !first.isTensor() || call.is_alias(first.toTensor()),
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
    return;
  }
  TORCH_CHECK(
      !call.has_host_tensors(), "Expected all tensors to be on the same device, but found at least two devices, ",
      *call.device, " and cpu! (when running ", name, ")");
}

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.operator_name().name;
  const auto first = stack->size() - schema.arguments().size();
  if (waits(name, *stack, first)) observe(name);
  if (g_without_data && (name.rfind("c10d::", 0) == 0 ? skip_collective(op, stack) : skip(op, stack))) return;
  Aliases call;
  bool has_generator = false;
  for (auto i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    map_tensors(value, [&](const Tensor& tensor) { return call.alias(tensor); });
    if (value.isDevice() && value.toDevice().type() == kDeviceType) {
      const auto asked = value.toDevice();
      if (!call.device) call.device = Device(kDeviceType, asked.has_index() ? asked.index() : t_current_device);
      value = Device(c10::kCPU);
    } else if (value.isGenerator()) {
      const auto given = value.toGenerator();
      TORCH_CHECK(
          given.device().type() == kDeviceType, "Expected a '", c10::get_privateuse1_backend(),
          "' device type for generator but found '", given.device().type(), "'");
      value = inner_of(given);
      has_generator = true;
    }
  }
  if (!call.device) call.device = Device(kDeviceType, t_current_device);
  if (!schema.arguments().empty()) check_devices(name, call, (*stack)[first]);
  const c10::DeviceGuard guard(*call.device);
  {
    std::optional<BorrowedRandomState> state;
    if (!has_generator && op.hasTag(at::Tag::nondeterministic_seeded))
      state.emplace(inner_of(default_generator(call.device->index())));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.take_over_resized();
  for (auto i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    map_tensors((*stack)[i], [&](const Tensor& tensor) { return call.unalias(tensor); });
}

// --------------------------------------------------------------------------------- kernels that cannot be the CPU's own

c10::DeviceGuard guard_of(std::optional<Device> device, std::optional<at::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "the simulated device has strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  return c10::DeviceGuard(c10::device_or_default(device));
}

Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  const auto guard = guard_of(device, layout, pin);
  return at::detail::empty_generic(size, &g_allocator, kDeviceKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<Device> device, std::optional<bool> pin) {
  const auto guard = guard_of(device, layout, pin);
  return at::detail::empty_strided_generic(size, stride, &g_allocator, kDeviceKeys, c10::dtype_or_default(dtype));
}

// Whether a copy between host and device is one that the host waits for: all but those that are asked not to, from or
// to page-locked memory. What lies in the device's own memory has come from a collective (aliases.h).
void observe_copy(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.device().type() == to.device().type() || to.numel() == 0) return;
  const auto &host = from.is_cpu() ? from : to, &device = from.is_cpu() ? to : from;
  if (host.storage().data() == device.storage().data() || (non_blocking && is_pinned(host.data_ptr()))) return;
  observe(from.is_cpu() ? "copy to device" : "copy to host", to.nbytes());
}

// The one thing that goes from one device to another.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  observe_copy(from, to, non_blocking);
  if (is_without_data(to) || (is_without_data(from) && from.numel() > kComputed)) return to;
  at::AutoDispatchBelowADInplaceOrView below;
  Aliases of_from, of_to;
  auto target = of_to.alias(to);
  target.copy_(of_from.alias(from));
  return to;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  observe("item", self.nbytes());
  Aliases call;
  return call.alias(self).item();
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

// Which attention kernel: the one that the CPU would take, so that the digits are the CPU's.
int64_t fused_sdp_choice(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool causal, std::optional<double> scale, bool gqa) {
  // Without data: the kernel that holds least, as a GPU's do, dropout and masks included.
  if (g_without_data) return static_cast<int64_t>(at::SDPBackend::flash_attention);
  at::AutoDispatchBelowADInplaceOrView below;
  Aliases call;
  const auto host_mask = mask ? std::optional<Tensor>(call.alias(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(
      call.alias(query), call.alias(key), call.alias(value), host_mask, dropout, causal, scale, gqa);
}

// Calls `with` two functions: one that brings a tensor to where it is computed, the CPU's memory or, without data, to
// meta; and one that brings a result back.
template <typename With>
auto through(const Tensor& of_device, const With& with) {
  if (is_without_data(of_device)) {
    MetaCall call;
    Results results(of_device.device(), {});
    return with(
        [&](const Tensor& tensor) { return call.to_meta(tensor); },
        [&](const Tensor& tensor) { return results.make(call.shape_of(tensor)); });
  }
  Aliases call;
  return with(
      [&](const Tensor& tensor) { return call.alias(tensor); },
      [&](const Tensor& tensor) { return call.unalias(tensor); });
}

// Of integers too, as CUDA's; the CPU's kernel takes floating-point numbers only.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  at::AutoDispatchBelowADInplaceOrView below;
  const c10::DeviceGuard guard(self.device());
  const auto dtype = self.scalar_type();
  return through(self, [&](const auto& there, const auto& back) {
    if (!at::isIntegralType(dtype, true)) return back(at::histc(there(self), bins, min, max));
    return back(at::histc(there(self).to(at::kFloat), bins, min, max).to(dtype));
  });
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  at::AutoDispatchBelowADInplaceOrView below;
  const c10::DeviceGuard guard(input.device());
  const auto with = [&](const auto& there, const auto& back) {
    const auto bias_there = bias ? std::optional<Tensor>(there(*bias)) : std::nullopt;
    return back(at::convolution(
        there(input), there(weight), bias_there, stride, padding, dilation, transposed, output_padding, groups));
  };
  return through(input, with);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  at::AutoDispatchBelowADInplaceOrView below;
  const c10::DeviceGuard guard(input.device());
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  const auto with = [&](const auto& there, const auto& back) {
    auto [of_input, of_weight, of_bias] = at::convolution_backward(
        there(gradient), there(input), there(weight), c10::IntArrayRef(channels), stride, padding, dilation,
        transposed, output_padding, groups, mask);
    return std::make_tuple(back(of_input), back(of_weight), back(of_bias));
  };
  return through(input, with);
}

// -------------------------------------------------------------------------------------------------------- registration

struct Quiet : c10::WarningHandler {  // torch warns of each of its own kernels that is replaced
  void process(const c10::Warning&) override {}
};

// Registers run_on_cpu for every operator of a namespace that the CPU has a kernel for. By name, since a composite kernel
// would go before a fallback, and has other digits than the CPU's own.
void run_all_on_cpu(torch::Library& library, const std::string& prefix, const std::set<std::string>& but) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto full = toString(name);
    if (name.name.rfind(prefix, 0) != 0 || but.count(full)) continue;
    const auto op = dispatcher.findSchema(name);
    if (op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", [](const Tensor& from, const Tensor& to) {
    return copy_from(from, to.resize_(from.sizes()), false);
  });
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize);
  m.impl("as_strided", TORCH_FN(at::cpu::as_strided));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("set_.source_Storage", [](Tensor& self, Storage source) -> Tensor& { return at::native::set_(self, source); });
  m.impl(
      "set_.source_Storage_storage_offset",
      [](Tensor& self, Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) -> Tensor& {
        return at::cpu::set_(self, source, offset, size, stride);
      });
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  // As between CPU and CUDA: Module.to() keeps the parameters' objects, and so optimizers and ties keep theirs.
  m.impl("_has_compatible_shallow_copy_type", [](const Tensor&, const Tensor&) { return true; });
  m.impl("record_stream", [](Tensor&, c10::Stream) {});
  m.impl("histc", histc);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  run_all_on_cpu(
      m, "aten::",
      {"aten::empty.memory_format", "aten::empty_strided", "aten::_local_scalar_dense", "aten::resize_",
       "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::set_.source_Storage",
       "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::histc",
       "aten::_fused_sdp_choice"});
}

// Collectives of device tensors are those of the process group's CPU backend (gloo), on the same memory.
TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  run_all_on_cpu(m, "c10d::", {});
}

}  // namespace simgpu

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // CUDA's lists of what is computed in which precision
#define SIMGPU_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIMGPU_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIMGPU_SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIMGPU_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIMGPU_LOWER)
  AT_FORALL_FP32(SIMGPU_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIMGPU_SET_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIMGPU_PROMOTE)
}

}  // namespace at::autocast

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simgpu::fused_sdp_choice)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simgpu;
  m.def("init", [](const std::vector<int64_t>& bytes, bool without_data) {  // bytes of each device
    TORCH_CHECK(!bytes.empty() && bytes.size() <= kMostDevices, "1 to ", kMostDevices, " devices");
    g_num_devices = static_cast<DeviceIndex>(bytes.size());
    for (size_t i = 0; i < bytes.size(); ++i) g_accounts[i].total = g_accounts[i].limit = bytes[i];
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    if (!without_data) return;
    Quiet quiet;
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    g_without_data = true;
    skip_on_the_host();
  });
  m.def("device_count", [] { return int(g_num_devices); });
  m.def("current_device", [] { return int(t_current_device); });
  m.def("set_device", [](int device) { Guard().setDevice(Device(kDeviceType, static_cast<DeviceIndex>(device))); });
  m.def("set_limit", [](int device, int64_t bytes) { g_accounts[device].limit = bytes; });
  m.def("total", [](int device) { return g_accounts[device].total; });
  m.def("observe", &set_observer);
  m.def("pinned_bytes", &pinned_bytes);
  m.def("peak_host_bytes", [](bool reset) {  // since the last reset; without data
    std::lock_guard<std::mutex> lock(g_host.mutex);
    if (reset) g_host.peak = g_host.current;
    return g_host.peak;
  });
  m.def("default_generator", [](int device) { return default_generator(static_cast<DeviceIndex>(device)); });
}
