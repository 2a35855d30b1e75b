// Experts' matrices in the layout that ggml's repacked CPU kernels read (its CPU_REPACK buffer type): made when a pack
// is written, used from the slots. Which types and shapes have such a layout is ggml's decision on this machine.
//
// Seam     a ggml tensor is computed by those kernels when its buffer is of that type and its `extra` is what
//          init_tensor of that buffer left there; the bytes may be anywhere. So one small buffer serves all slots.
// Tag      ggml's version and the CPU features that its choice depends on. Bytes made under another tag may be
//          garbage to these kernels.
// Lifetime outlives the tensors that were made native.
// Errors   kUnsupported: this ggml has no such buffer type.
// Threads  const after create.
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "store/pack_writer.h"

namespace sluice {

class NativeLayout : public SlabTransform {
 public:
  static Result<std::unique_ptr<NativeLayout>> create();
  ~NativeLayout() override;
  NativeLayout(const NativeLayout&) = delete;

  std::string tag() const override { return tag_; }
  bool applies(const ExpertTensorShape& shape) const override;
  Status apply(const ExpertTensorShape& shape, const std::byte* from, std::byte* to) const override;

  // Makes ggml compute `matrix`, a tensor of one expert with native bytes, by the repacked kernels. False where type
  // and shape have none.
  bool make_native(ggml_tensor* matrix) const;

  // Of whole tensors that ggml rearranges by itself: for tests.
  ggml_backend_buffer_type_t buffer_type() const { return buffer_type_; }

 private:
  NativeLayout() = default;

  ggml_backend_buffer_type_t buffer_type_ = nullptr;
  ggml_backend_buffer_t buffer_ = nullptr;  // small; only says of which type the tensors' memory is
  std::string tag_;
};

}  // namespace sluice
