// Which kernel runs is a function of shape and type alone; no device is needed to ask.
#include <doctest/doctest.h>

#include <set>

#include "kernels/cuda/expert_gemm.h"
#include "kernels/cuda/layout.h"
#include "kernels/cuda/prefill.h"

namespace k3::cuda {
namespace {

Weight matrix(BlockType type, std::int64_t n_in, std::int64_t n_out, std::int64_t n_mat = 1,
              Layout layout = kRaw) {
  Weight w;
  w.type = type;
  w.n_in = n_in;
  w.n_out = n_out;
  w.n_mat = n_mat;
  w.layout = layout;
  return w;
}

}  // namespace

TEST_CASE("products go to tensor cores from 33 tokens on, where rows are whole octets") {
  Weight w = matrix(BlockType::kQ8_0, 7168, 100);
  CHECK(!uses_panels(w, 32));
  CHECK(uses_panels(w, 33));
  w.n_in = 20;
  CHECK(!uses_panels(w, 4096));
  w.n_in = 24;
  w.first = 4;
  CHECK(!uses_panels(w, 4096));
  w.first = 16;
  CHECK(uses_panels(w, 4096));
  w.n_out = 0;
  CHECK(!uses_panels(w, 4096));
}

TEST_CASE("only f32 weights are split: others have no more than f16 keeps") {
  CHECK(panel_terms(BlockType::kF32) == 3);
  CHECK(panel_terms(BlockType::kQ8_0) == 1);
  CHECK(panel_terms(BlockType::kBF16) == 1);
}

TEST_CASE("experts are grouped where all three matrices are IQ1_S in planes") {
  Weight gate = matrix(BlockType::kIQ1_S, 3584, 3072, 896, kPlanes), up = gate,
         down = matrix(BlockType::kIQ1_S, 3072, 3584, 896, kPlanes);
  const ExpertWeights w{&gate, &up, &down, 0};
  CHECK(uses_grouped_experts(w, 33));
  CHECK(!uses_grouped_experts(w, 32));
  down.type = BlockType::kQ4_K;
  CHECK(!uses_grouped_experts(w, 4096));
  down.type = BlockType::kIQ1_S;
  down.layout = kRaw;
  CHECK(!uses_grouped_experts(w, 4096));
  down.layout = kPlanes;
  gate.n_mat = 0;
  CHECK(!uses_grouped_experts(w, 4096));
}

TEST_CASE("attention is expanded for K3's heads while one head fits the workspace") {
  const Weight k_b = matrix(BlockType::kQ8_0, 128, 512, 96),
               v_b = matrix(BlockType::kQ8_0, 512, 128, 96);
  MlaCache cache;
  cache.n_ctx = 131072;
  cache.kv_latent = 512;
  cache.rope = 64;
  BatchView batch;
  batch.n_tok = 65;
  batch.n_seg = 1;
  CHECK(uses_expanded_mla(k_b, v_b, cache, batch, Prefill::kBytes));
  CHECK(!uses_expanded_mla(k_b, v_b, cache, batch, 1 << 20));
  batch.n_tok = 64;
  CHECK(!uses_expanded_mla(k_b, v_b, cache, batch, Prefill::kBytes));
  batch.n_tok = batch.n_seg = 100;  // a step of many sequences would expand every one's cache
  CHECK(!uses_expanded_mla(k_b, v_b, cache, batch, Prefill::kBytes));
  batch.n_seg = 1;
  cache.shard.n_part = 2;
  CHECK(!uses_expanded_mla(k_b, v_b, cache, batch, Prefill::kBytes));
  cache.shard.n_part = 1;
  cache.rope = 32;
  CHECK(!uses_expanded_mla(k_b, v_b, cache, batch, Prefill::kBytes));
}

TEST_CASE("the delta rule is chunked for heads of 128 and segments of two chunks on average") {
  KdaState state;
  state.head_dim = 128;
  state.n_head = 96;
  BatchView batch;
  batch.n_tok = 64;
  batch.n_seg = 2;
  const View<const float> rows(nullptr, 64, 128);
  CHECK(uses_chunked_kda(state, batch, rows, rows));
  batch.n_seg = 3;
  CHECK(!uses_chunked_kda(state, batch, rows, rows));
  batch.n_seg = 1;
  CHECK(!uses_chunked_kda(state, batch, View<const float>(nullptr, 64, 128, 130), rows));
  state.head_dim = 64;
  CHECK(!uses_chunked_kda(state, batch, rows, rows));
}

TEST_CASE("the order of slots is a permutation of every block of 128") {
  std::set<std::int64_t> seen;
  for (std::int64_t s = 128; s < 256; ++s) seen.insert(element_of_slot(s));
  CHECK(seen.size() == 128);
  CHECK(*seen.begin() == 128);
  CHECK(*seen.rbegin() == 255);
  // A thread's slots of a k-step pair lie in one octet of the file.
  CHECK(element_of_slot(0) / 8 == element_of_slot(1) / 8);
  CHECK(element_of_slot(0) / 8 == element_of_slot(24) / 8);
}

TEST_CASE("rows and tiles of sorted experts stay within their bounds") {
  CHECK(max_expert_rows(16, 896) == 16 + 7 * 16 + kMaxTile);
  CHECK(max_expert_rows(65536, 896) == 65536 + 7 * 896 + kMaxTile);
  CHECK(max_expert_tiles(5, 896) == 5);
}

}  // namespace k3::cuda
