#include "moe/native_layout.h"

#include <string_view>

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

namespace sluice {

namespace {

constexpr std::string_view kBufferTypeName = "CPU_REPACK";
constexpr size_t kMarkerBytes = 64;

ggml_backend_buffer_type_t find_buffer_type() {
  ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (device == nullptr) return nullptr;
  const auto get = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
      ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
  ggml_backend_buffer_type_t* types = get != nullptr ? get(device) : nullptr;
  for (; types != nullptr && *types != nullptr; ++types) {
    if (ggml_backend_buft_name(*types) == kBufferTypeName) return *types;
  }
  return nullptr;
}

// "ggml 0.25.3 x86_64 AVX AVX2 ...": what ggml's choice of a layout depends on.
std::string make_tag() {
  std::string tag = fmt::format("ggml {}", ggml_version());
#if defined(__x86_64__)
  tag += " x86_64";
#elif defined(__aarch64__)
  tag += " aarch64";
#endif
  ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
  const auto get = reinterpret_cast<ggml_backend_get_features_t>(
      ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features"));
  for (const ggml_backend_feature* feature = get != nullptr ? get(reg) : nullptr;
       feature != nullptr && feature->name != nullptr; ++feature) {
    const std::string_view name = feature->name;
    const std::string_view value = feature->value;
    if (value == "0" || name == "OPENMP") continue;  // how the work is shared among threads changes no layout
    tag += value == "1" ? fmt::format(" {}", name) : fmt::format(" {}={}", name, value);
  }
  return tag.substr(0, kPackTagBytesMax);
}

// One expert's matrix as a tensor that lives on its own.
ggml_tensor matrix_of(const ExpertTensorShape& shape) {
  ggml_tensor tensor{};
  tensor.type = shape.type;
  tensor.ne[0] = shape.n_in;
  tensor.ne[1] = shape.n_out;
  tensor.ne[2] = tensor.ne[3] = 1;
  tensor.nb[0] = ggml_type_size(shape.type);
  tensor.nb[1] = ggml_row_size(shape.type, shape.n_in);
  tensor.nb[2] = tensor.nb[3] = tensor.nb[1] * static_cast<size_t>(shape.n_out);
  return tensor;
}

}  // namespace

Result<std::unique_ptr<NativeLayout>> NativeLayout::create() {
  std::unique_ptr<NativeLayout> layout(new NativeLayout);
  layout->buffer_type_ = find_buffer_type();
  if (layout->buffer_type_ == nullptr) {
    return make_error(ErrorCode::kUnsupported, "native layout: this ggml has no {} buffers", kBufferTypeName);
  }
  layout->buffer_ = ggml_backend_buft_alloc_buffer(layout->buffer_type_, kMarkerBytes);
  if (layout->buffer_ == nullptr)
    return make_error(ErrorCode::kNoMemory, "native layout: no memory for a buffer of {} bytes", kMarkerBytes);
  layout->tag_ = make_tag();
  return layout;
}

NativeLayout::~NativeLayout() {
  ggml_backend_buffer_free(buffer_);
}

bool NativeLayout::make_native(ggml_tensor* matrix) const {
  matrix->buffer = buffer_;
  ggml_backend_buffer_init_tensor(buffer_, matrix);
  return matrix->extra != nullptr;
}

bool NativeLayout::applies(const ExpertTensorShape& shape) const {
  ggml_tensor matrix = matrix_of(shape);
  return make_native(&matrix);
}

Status NativeLayout::apply(const ExpertTensorShape& shape, const std::byte* from, std::byte* to) const {
  ggml_tensor matrix = matrix_of(shape);
  SLUICE_ASSERT(make_native(&matrix), "{} [{}, {}] has no native layout", ggml_type_name(shape.type), shape.n_in,
                shape.n_out);
  matrix.data = to;
  // Through the buffer's own function, which rearranges; ggml_backend_tensor_set would check `to` against the buffer.
  buffer_->iface.set_tensor(buffer_, &matrix, from, 0, shape.slab_bytes);
  return {};
}

}  // namespace sluice
