// One call of an operator: its device tensors become CPU tensors on the same memory, and what comes back the device's.
#pragma once

#include <ATen/ATen.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "allocator.h"

namespace simgpu {

using at::Tensor;
using c10::Storage, c10::StorageImpl;

class Aliases {
 public:
  std::optional<Device> device;  // of the device tensors; all lie on the same
  bool has_host_tensors() const { return !host_.empty(); }  // a scalar tensor may lie on the CPU, as on CUDA
  bool has_device_tensors() const { return !pairs_.empty(); }
  bool is_alias(const Tensor& tensor) const { return originals_.count(tensor.unsafeGetTensorImpl()) > 0; }

  // A CPU tensor on the memory of a device tensor; a CPU tensor is passed on, and noted.
  Tensor alias(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_privateuseone()) {
      if (tensor.dim() > 0) host_.push_back(tensor);
      return tensor;
    }
    if (!device) device = tensor.device();
    TORCH_CHECK(
        *device == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
        *device, " and ", tensor.device(), "!");
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        Storage(host_storage(tensor)), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    originals_.emplace(impl, tensor);
    pairs_.emplace_back(made, tensor);
    return made;
  }

  // The device tensor for what the CPU's kernel has returned: the argument itself, a view of one, or new memory.
  Tensor unalias(const Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    if (const auto found = originals_.find(result.unsafeGetTensorImpl()); found != originals_.end()) return found->second;
    for (const auto& given : host_)
      if (given.is_same(result)) return result;
    TORCH_CHECK(result.layout() == c10::kStrided, "the simulated device has strided tensors only");
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        Storage(device_storage(result)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    return made;
  }

  // After the call: arguments that the kernel has resized, with memory that it may have allocated.
  void take_over_resized() {
    for (auto& [cpu, storage] : to_device_) {
      auto* own = storage.unsafeGetStorageImpl();
      if (cpu->data() == own->data()) continue;
      const auto size = cpu->nbytes();
      own->set_data_ptr_noswap(adopt(take_memory(cpu), size, own->device().index()));
      own->set_nbytes(size);
    }
    for (auto& [made, tensor] : pairs_)
      if (made.sizes() != tensor.sizes() || made.strides() != tensor.strides())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
  }

 private:
  const Storage& host_storage(const Tensor& tensor) {
    auto* own = tensor.storage().unsafeGetStorageImpl();
    auto found = to_host_.find(own);
    if (found == to_host_.end()) {
      // It holds the device's memory: a collective may still be at work on it when the call has returned.
      DataPtr memory(
          own->mutable_data(), new Storage(tensor.storage()), [](void* held) { delete static_cast<Storage*>(held); },
          Device(c10::kCPU));
      Storage storage(c10::make_intrusive<StorageImpl>(
          StorageImpl::use_byte_size_t(), own->nbytes(), std::move(memory), c10::GetCPUAllocator(), /*resizable=*/true));
      to_device_.emplace(storage.unsafeGetStorageImpl(), tensor.storage());
      found = to_host_.emplace(own, std::move(storage)).first;
    }
    return found->second;
  }

  const Storage& device_storage(const Tensor& result) {
    auto* cpu = result.storage().unsafeGetStorageImpl();
    auto found = to_device_.find(cpu);
    if (found == to_device_.end()) {
      const auto size = cpu->nbytes();
      Storage storage(c10::make_intrusive<StorageImpl>(
          StorageImpl::use_byte_size_t(), size, adopt(take_memory(cpu), size, device->index()), &g_allocator,
          /*resizable=*/true));
      results_.push_back(result.storage());
      found = to_device_.emplace(cpu, std::move(storage)).first;
    }
    return found->second;
  }

  static DataPtr take_memory(StorageImpl* cpu) { return cpu->set_data_ptr(DataPtr(nullptr, Device(c10::kCPU))); }

  std::unordered_map<StorageImpl*, Storage> to_host_, to_device_;
  std::unordered_map<c10::TensorImpl*, Tensor> originals_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;  // alias, original
  std::vector<Tensor> host_;
  std::vector<Storage> results_;  // kept until the call ends, so that no address in to_device_ comes twice
};

}  // namespace simgpu
