// Which operations around an expert product the device takes: the block and its sum, and nothing behind it, so that
// ggml's scheduler cuts the graph where the block ends.
#include <gtest/gtest.h>

#include "ggml-cpp.h"
#include "ggml-sluice.h"
#include "ggml.h"

namespace {

constexpr int64_t kEmbd = 64;
constexpr int64_t kTopK = 2;

class SupportsOp : public testing::TestWithParam<int64_t> {  // tokens
 protected:
  SupportsOp() : device_(ggml_backend_reg_dev_get(ggml_backend_sluice_reg(), 0)) {
    ctx_.reset(ggml_init({.mem_size = 1 << 20, .mem_buffer = nullptr, .no_alloc = true}));
    weights_ctx_.reset(ggml_init({.mem_size = 1 << 16, .mem_buffer = nullptr, .no_alloc = true}));
    ggml_tensor* weight = ggml_new_tensor_3d(weights_ctx_.get(), GGML_TYPE_F32, kEmbd, kEmbd, 4);
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(weights_ctx_.get(), ggml_backend_dev_buffer_type(device_)));
    x_ = ggml_new_tensor_3d(ctx_.get(), GGML_TYPE_F32, kEmbd, 1, GetParam());
    ggml_tensor* ids = ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_I32, kTopK, GetParam());
    product_ = ggml_mul_mat_id(ctx_.get(), weight, x_, ids);
    ggml_tensor* first = ggml_view_2d(ctx_.get(), product_, kEmbd, GetParam(), product_->nb[2], 0);
    ggml_tensor* second = ggml_view_2d(ctx_.get(), product_, kEmbd, GetParam(), product_->nb[2], product_->nb[1]);
    sum_ = ggml_add(ctx_.get(), first, second);
  }

  bool takes(const ggml_tensor* op) { return ggml_backend_dev_supports_op(device_, op); }

  ggml_backend_dev_t device_;
  ggml_context_ptr ctx_;
  ggml_context_ptr weights_ctx_;
  ggml_backend_buffer_ptr buffer_;
  ggml_tensor* x_ = nullptr;
  ggml_tensor* product_ = nullptr;
  ggml_tensor* sum_ = nullptr;
};

TEST_P(SupportsOp, TheBlockAndItsSum) {
  EXPECT_TRUE(takes(product_));
  EXPECT_TRUE(takes(ggml_silu(ctx_.get(), product_)));
  EXPECT_TRUE(takes(ggml_rms_norm(ctx_.get(), ggml_silu(ctx_.get(), product_), 1e-6f)));
  EXPECT_TRUE(takes(sum_));
}

TEST_P(SupportsOp, NothingBehindTheNormThatFollows) {
  ggml_tensor* norm =
      ggml_rms_norm(ctx_.get(), ggml_add(ctx_.get(), sum_, ggml_reshape_2d(ctx_.get(), x_, kEmbd, GetParam())), 1e-6f);
  EXPECT_FALSE(takes(norm));
  EXPECT_FALSE(takes(ggml_mul(ctx_.get(), norm, ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_F32, kEmbd))));
  EXPECT_FALSE(takes(ggml_silu(ctx_.get(), x_)));
}

INSTANTIATE_TEST_SUITE_P(Tokens, SupportsOp, testing::Values(1, 2, 7));

}  // namespace
