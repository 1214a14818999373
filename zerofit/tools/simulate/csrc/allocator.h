// Device memory and pinned host memory: both are host memory, and both are kept account of.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <sys/mman.h>

#include <bit>
#include <cstring>
#include <iomanip>
#include <map>
#include <mutex>
#include <sstream>

#include "observe.h"

namespace simgpu {

using c10::DataPtr, c10::Device, c10::DeviceIndex;
constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 16;
constexpr size_t kBlock = 512;  // CUDA's caching allocator rounds small requests up to this

constexpr size_t kLarge = 1 << 20;  // bytes, from which on a floating-point tensor of the host may be without data

inline bool g_without_data = false;  // see without_data.h
inline DeviceIndex g_num_devices = 1;
inline thread_local DeviceIndex t_current_device = 0;

// ------------------------------------------------------------------------------------------------- memory without data

struct HostAccount {  // bytes of the host's large tensors
  std::mutex mutex;
  int64_t current = 0, peak = 0;
  void add(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    current += bytes;
    peak = std::max(peak, current);
  }
};
inline HostAccount g_host;

struct Mapping {  // of address space: pages that nobody writes to take no memory, and read as zeros
  void* begin;
  size_t size;
  bool is_host;
};

inline void unmap(void* context) {
  auto* mapping = static_cast<Mapping*>(context);
  munmap(mapping->begin, mapping->size);
  if (mapping->is_host) g_host.add(-static_cast<int64_t>(mapping->size));
  delete mapping;
}

inline DataPtr untouched(size_t size, bool is_host) {
  void* begin = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(begin != MAP_FAILED, "the simulated device has no address space of ", size, " bytes");
  if (is_host) g_host.add(size);
  return DataPtr(begin, new Mapping{begin, size, is_host}, &unmap, Device(c10::kCPU));
}

inline DataPtr zeros(size_t size) {
  if (size >= kLarge) return untouched(size, /*is_host=*/false);
  auto memory = c10::GetCPUAllocator()->allocate(size);
  std::memset(memory.get(), 0, size);
  return memory;
}

// ------------------------------------------------------------------------------------------------------- device memory

struct Account {  // of one device, in this process
  std::mutex mutex;
  c10::CachingAllocator::Stat bytes, blocks, requested;
  c10::CachingAllocator::Stat reserved;  // the most that was allocated since the cache was emptied: nothing is fragmented
  int64_t total = 16LL << 30, limit = 16LL << 30, num_ooms = 0;
};
inline Account g_accounts[kMostDevices];

inline std::string human(int64_t bytes) {  // as CUDA's allocator writes it, since users of torch read that message
  std::ostringstream out;
  out << std::fixed << std::setprecision(2);
  if (bytes >= 1 << 30) out << bytes / double(1 << 30) << " GiB";
  else if (bytes >= 1 << 20) out << bytes / double(1 << 20) << " MiB";
  else if (bytes >= 1 << 10) out << bytes / double(1 << 10) << " KiB";
  else out << std::setprecision(0) << double(bytes) << " bytes";
  return out.str();
}

inline size_t rounded(size_t size) { return (size + kBlock - 1) / kBlock * kBlock; }

// Refuses what is beyond the limit. The account's mutex is held.
inline void check_room(Account& account, DeviceIndex device, size_t size) {
  const auto used = account.bytes.current;
  if (used + static_cast<int64_t>(size) <= account.limit) return;
  account.num_ooms += 1;
  const auto allowed = account.limit < account.total ? human(account.limit) + " allowed; " : "";
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, c10::get_privateuse1_backend(), " out of memory. Tried to allocate ", human(size), ". GPU ",
      int(device), " has a total capacity of ", human(account.total), " of which ", human(account.total - used),
      " is free. Including non-PyTorch memory, this process has ", human(used), " memory in use. ", allowed,
      "Of the allocated memory ", human(used), " is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
      "unallocated.");
}

struct Block {  // the context of every DataPtr of a device: it owns the host memory behind it
  DataPtr host;
  size_t counted, requested;
  DeviceIndex device;
};

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& account = g_accounts[block->device];
  {
    std::lock_guard<std::mutex> lock(account.mutex);
    account.bytes.decrease(block->counted);
    account.requested.decrease(block->requested);
    account.blocks.decrease(1);
  }
  delete block;
}

// Host memory becomes memory of the device: counted, and refused beyond the limit.
inline DataPtr adopt(DataPtr host, size_t requested, DeviceIndex device) {
  const Device where(kDeviceType, device);
  void* data = host.get();
  if (data == nullptr || requested == 0) return DataPtr(nullptr, where);
  const size_t size = rounded(requested);
  auto& account = g_accounts[device];
  {
    std::lock_guard<std::mutex> lock(account.mutex);
    check_room(account, device, size);
    account.bytes.increase(size);
    account.requested.increase(requested);
    account.blocks.increase(1);
    const auto grown = account.bytes.current - account.reserved.current;
    if (grown > 0) account.reserved.increase(grown);
  }
  return DataPtr(data, new Block{std::move(host), size, requested, device}, &free_block, where);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  DataPtr allocate(size_t size) override {
    if (size == 0) return DataPtr(nullptr, Device(kDeviceType, t_current_device));
    {  // before the host is asked for what may be more than it has
      auto& account = g_accounts[t_current_device];
      std::lock_guard<std::mutex> lock(account.mutex);
      check_room(account, t_current_device, rounded(size));
    }
    return adopt(g_without_data ? zeros(size) : c10::GetCPUAllocator()->allocate(size), size, t_current_device);
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
  bool initialized() override { return true; }
  void recordStream(const DataPtr&, c10::Stream) override {}

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    observe("empty cache");
    for (auto& account : g_accounts) {
      std::lock_guard<std::mutex> lock(account.mutex);
      account.reserved.decrease(account.reserved.current - account.bytes.current);
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    auto& account = g_accounts[device];
    std::lock_guard<std::mutex> lock(account.mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.active_bytes[0] = account.bytes;
    stats.reserved_bytes[0] = account.reserved;
    stats.requested_bytes[0] = account.requested;
    stats.allocation[0] = stats.active[0] = account.blocks;
    stats.num_ooms = account.num_ooms;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    auto& account = g_accounts[device];
    std::lock_guard<std::mutex> lock(account.mutex);
    for (auto* stat : {&account.bytes, &account.blocks, &account.reserved, &account.requested}) stat->reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    auto& account = g_accounts[device];
    std::lock_guard<std::mutex> lock(account.mutex);
    for (auto* stat : {&account.bytes, &account.blocks, &account.reserved, &account.requested}) stat->reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {  // (free, total)
    auto& account = g_accounts[device];
    std::lock_guard<std::mutex> lock(account.mutex);
    return {account.total - account.reserved.current, account.total};
  }
};
inline DeviceAllocator g_allocator;

// --------------------------------------------------------------------------------------------------- pinned host memory

inline std::mutex g_pinned_mutex;
inline std::map<const char*, size_t> g_pinned;  // where each pinned block begins, and its size

// What is taken of the host: torch's allocator of pinned memory rounds every block up to a power of two.
inline int64_t pinned_bytes() {
  std::lock_guard<std::mutex> lock(g_pinned_mutex);
  int64_t bytes = 0;
  for (const auto& [begin, size] : g_pinned) bytes += std::bit_ceil(size);
  return bytes;
}

inline void unpin(void* context) {
  auto* host = static_cast<DataPtr*>(context);
  {
    std::lock_guard<std::mutex> lock(g_pinned_mutex);
    g_pinned.erase(static_cast<const char*>(host->get()));
  }
  delete host;
}

inline bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(g_pinned_mutex);
  const auto after = g_pinned.upper_bound(static_cast<const char*>(data));
  if (after == g_pinned.begin()) return false;
  const auto& [begin, size] = *std::prev(after);
  return static_cast<const char*>(data) < begin + size;
}

struct PinnedAllocator final : at::HostAllocator {
  DataPtr allocate(size_t size) override {
    auto host = c10::GetCPUAllocator()->allocate(g_without_data ? std::bit_ceil(size) : size);
    void* data = host.get();
    if (data == nullptr) return host;
    std::lock_guard<std::mutex> lock(g_pinned_mutex);
    g_pinned[static_cast<const char*>(data)] = size;
    return DataPtr(data, new DataPtr(std::move(host)), &unpin, Device(c10::kCPU));
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline PinnedAllocator g_pinned_allocator;

}  // namespace simgpu
