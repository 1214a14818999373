// What torch asks a backend for beside memory and kernels: devices, streams, events, generators, hooks.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "allocator.h"

namespace simgpu {

// ------------------------------------------------------- devices, and streams and events that have nothing to wait for

using Moment = std::chrono::steady_clock::time_point;  // an event remembers when it was recorded, for elapsed_time
inline std::atomic<int64_t> g_next_stream{1};
inline thread_local c10::StreamId t_streams[kMostDevices] = {};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  Device getDevice() const override { return Device(kDeviceType, t_current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(
        device.type() == kDeviceType && device.index() < g_num_devices, "invalid device ordinal: ", device, " of ",
        int(g_num_devices));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) t_current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return g_num_devices; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return c10::DeviceCapability(); }

  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), t_streams[indexed(device).index()]);
  }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, indexed(device));
  }
  c10::Stream getNewStream(Device device, int = 0) const override {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), g_next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    t_streams[indexed(stream.device()).index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { observe("synchronize stream"); }
  void synchronizeDevice(const DeviceIndex) const override { observe("synchronize device"); }

  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Moment();
    *static_cast<Moment*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { observe("synchronize event"); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    const std::chrono::duration<double, std::milli> passed =
        *static_cast<Moment*>(second) - *static_cast<Moment*>(first);
    return passed.count();
  }

 private:
  static Device indexed(Device device) { return device.has_index() ? device : Device(kDeviceType, t_current_device); }
};

// ---------------------------------------------------------------------------------------------------------- generators

struct Generator final : c10::GeneratorImpl {  // a CPU generator that says that it is the device's
  at::Generator inner;
  explicit Generator(DeviceIndex device, at::Generator generator = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(Device(kDeviceType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(generator)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), inner.clone()); }
};

inline at::Generator& inner_of(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

inline const at::Generator& default_generator(DeviceIndex device) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex index = 0; index < kMostDevices; ++index) made.push_back(at::make_generator<Generator>(index));
    return made;
  }();
  return generators[device < 0 ? t_current_device : device];
}

// --------------------------------------------------------------------------------------------------------------- hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return g_num_devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return g_num_devices; }
  DeviceIndex getCurrentDevice() const override { return t_current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(kDeviceType, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(kDeviceType, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 || device >= g_num_devices ? t_current_device : exchangeDevice(device);
  }
  at::Device getDeviceFromPtr(void*) const override { return Device(kDeviceType, t_current_device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? t_current_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(storage.device());
    auto fresh = g_allocator.allocate(size);
    const auto kept = std::min(size, impl->nbytes());
    if (kept > 0 && !(g_without_data && kept >= kLarge)) std::memcpy(fresh.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
  }
};

}  // namespace simgpu
