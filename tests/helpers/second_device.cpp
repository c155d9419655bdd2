// A device for torch in the CPU's memory, under another name: operations on tensors of both raise, as on a GPU.
//
// It is torch's "privateuseone". Views and copies are its own here; all else is done by the CPU's kernels. 0-dimensional
// CPU tensors are taken beside its own, and so are indices.

#include <ATen/core/Tensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <set>
#include <string>

namespace {

using c10::DeviceIndex;
using c10::Stream;

const c10::Device DEVICE(c10::DeviceType::PrivateUse1, 0);
const std::set<std::string> TAKE_CPU_INDICES = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};

struct Memory final : c10::Allocator {
  static void release(void* at) { free(at); }
  c10::DataPtr allocate(size_t size) override {
    void* at = size ? aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    return {at, at, &release, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  Stream getStream(c10::Device) const override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, DEVICE); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : c10::GeneratorImpl {
  at::Generator on_cpu = at::detail::createCPUGenerator();
  Generator() : GeneratorImpl(DEVICE, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { on_cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return on_cpu.current_seed(); }
  uint64_t seed() override { return on_cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { on_cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator();
    copy->on_cpu = on_cpu.clone();
    return copy;
  }
};
const at::Generator default_generator = at::make_generator<Generator>();

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator; }
  at::Generator getNewGenerator(DeviceIndex) const override { return default_generator; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DataPtr fresh = memory.allocate(size);
    if (storage.data()) memcpy(fresh.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
const bool has_hooks = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

at::Tensor seen_by_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  seen_by_cpu(to).copy_(seen_by_cpu(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar item(const at::Tensor& self) { return seen_by_cpu(self).item(); }

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (self.sizes() == size) return self;  // strides stay
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  const size_t needed = (tensor->storage_offset() + tensor->numel()) * tensor->dtype().itemsize();
  if (tensor->storage().nbytes() < needed) Hooks().resizePrivateUse1Bytes(tensor->storage(), needed);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_storage_offset(offset);
  tensor->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  const auto& name = op.schema().name();
  bool has_cpu = false, has_device = false;
  const auto look = [&](const at::Tensor& tensor, bool is_index) {
    has_device |= tensor.defined() && tensor.is_privateuseone();
    has_cpu |= tensor.defined() && tensor.is_cpu() && tensor.dim() > 0 && !is_index;
  };
  for (auto& value : torch::jit::last(*stack, count)) {
    if (value.isTensor()) look(value.toTensor(), false);
    if (value.isTensorList())
      for (const auto& each : value.toTensorVector()) look(each, false);
    if (value.isOptionalTensorList())
      for (const auto& each : value.toOptionalTensorVector())
        if (each) look(*each, TAKE_CPU_INDICES.count(name));
  }
  for (size_t at = 0; at < count; at++) {
    auto& value = stack->at(stack->size() - count + at);
    if (op.schema().arguments()[at].type()->str().find("Generator") == std::string::npos) continue;
    const auto generator = value.isGenerator() ? value.toGenerator() : default_generator;
    TORCH_CHECK(!generator.device().is_cpu(), name, " on the second device has a generator of the CPU");
    value = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->on_cpu;
  }
  TORCH_CHECK(!(has_cpu && has_device), name, " has tensors of the CPU and of the second device");
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("resize_", TORCH_FN(resize));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(item));
}
