#include "loader/slot_plan.h"

#include <algorithm>
#include <map>

namespace sluice {

namespace {

constexpr uint64_t kSlabAlignBytes = 64;   // a cache line: kernels like aligned rows, none needs them
constexpr uint64_t kSlotAlignBytes = 4096; // slots read in place start on a page
constexpr uint32_t kStagingBuffersMin = 4;
constexpr uint32_t kStagingBuffersMax = 64;
constexpr uint64_t kStagingShare = 16;     // staging takes at most a sixteenth of the budget

// The bytes a direct read of any expert's span covers, at most.
uint64_t region_bytes(const SpanSource& span, uint32_t n_expert) {
  const uint64_t align = span.file->align_bytes();
  uint64_t bytes_max = 0;
  for (uint32_t expert = 0; expert < n_expert; ++expert) {
    const uint64_t begin = span.offset_of(expert);
    const uint64_t end = begin + span.bytes;
    bytes_max = std::max(bytes_max, align_up(end, align) - align_down(begin, align));
  }
  return bytes_max;
}

uint64_t place_regions(const LayerSource& source, bool staged, std::vector<Region>& regions) {
  uint64_t offset = 0;
  regions.clear();
  for (const SpanSource& span : source.spans) {
    const uint64_t align = staged ? kSlabAlignBytes : std::max(kSlabAlignBytes, span.file->align_bytes());
    offset = align_up(offset, align);
    const uint64_t bytes = staged ? span.bytes : region_bytes(span, source.n_expert);
    regions.push_back({offset, bytes});
    offset += bytes;
  }
  return align_up(offset, staged ? kSlabAlignBytes : kSlotAlignBytes);
}

}  // namespace

void LayerSource::add_matrix(MatrixRole role, std::shared_ptr<const File> file, uint64_t offset, uint64_t slab_bytes) {
  matrices.push_back({.role = role, .span = static_cast<uint32_t>(spans.size()), .offset = 0, .slab_bytes = slab_bytes});
  spans.push_back({.file = std::move(file), .offset = offset, .stride_bytes = slab_bytes, .bytes = slab_bytes});
}

uint64_t LayerSource::record_bytes() const {
  uint64_t bytes = 0;
  for (const SpanSource& span : spans) bytes += span.bytes;
  return bytes;
}

uint32_t SlotPlan::n_slot() const {
  uint32_t total = 0;
  for (const ClassPlan& size_class : classes) total += size_class.n_slot;
  return total;
}

SlotPlan plan_layout(const std::vector<LayerSource>& sources, uint32_t top_k, bool per_layer) {
  SlotPlan plan;
  std::map<std::pair<uint64_t, uint32_t>, uint32_t> class_of;  // by slot bytes and, with a class per layer, layer
  for (const LayerSource& source : sources) {
    LayerLayout layout;
    std::vector<Region> in_place;
    const uint64_t in_place_bytes = place_regions(source, false, in_place);
    const bool direct = std::any_of(source.spans.begin(), source.spans.end(),
                                    [](const SpanSource& span) { return span.file->align_bytes() > 1; });
    const double record_bytes = static_cast<double>(source.record_bytes());
    layout.staged = direct && static_cast<double>(in_place_bytes) > record_bytes * (1 + kPaddingMax);
    // A buffered read needs no alignment: packed regions are then in place as they are.
    const uint64_t slot_bytes = place_regions(source, layout.staged || !direct, layout.regions);
    if (layout.staged) {
      for (const SpanSource& span : source.spans) {
        plan.staging_bytes = std::max(plan.staging_bytes, align_up(region_bytes(span, source.n_expert), kSlotAlignBytes));
      }
    }
    const auto [it, is_new] = class_of.try_emplace({slot_bytes, per_layer ? source.layer : 0}, static_cast<uint32_t>(plan.classes.size()));
    if (is_new) plan.classes.push_back({.slot_bytes = slot_bytes});
    layout.size_class = it->second;
    ClassPlan& size_class = plan.classes[it->second];
    size_class.n_slot_all += source.n_expert;
    size_class.n_slot_min = std::max(size_class.n_slot_min, std::max(1u, std::min(top_k, source.n_expert)));
    plan.expert_bytes += source.record_bytes() * source.n_expert;
    plan.layouts.push_back(std::move(layout));
  }
  const uint64_t staging_min = plan.staging_bytes * kStagingBuffersMin;
  plan.bytes_min = staging_min;
  plan.bytes_all = plan.staging_bytes * kStagingBuffersMax;
  for (const ClassPlan& size_class : plan.classes) {
    plan.bytes_min += size_class.slot_bytes * size_class.n_slot_min;
    plan.bytes_all += size_class.slot_bytes * size_class.n_slot_all;
  }
  return plan;
}

Status plan_slots(SlotPlan& plan, uint64_t budget_bytes) {
  if (budget_bytes < plan.bytes_min) {
    return make_error(ErrorCode::kNoMemory, "budget: this model needs at least {} ({} bytes), given {} ({} bytes)",
                      format_bytes(plan.bytes_min), plan.bytes_min, format_bytes(budget_bytes), budget_bytes);
  }
  uint64_t rest = budget_bytes;
  if (plan.staging_bytes > 0) {
    const uint64_t wanted = budget_bytes / kStagingShare / plan.staging_bytes;
    plan.n_staging = static_cast<uint32_t>(std::clamp<uint64_t>(wanted, kStagingBuffersMin, kStagingBuffersMax));
    rest -= plan.n_staging * plan.staging_bytes;
    // The smallest budgets hold just the least number of staging buffers beside the least number of slots.
    uint64_t slots_min = 0;
    for (const ClassPlan& size_class : plan.classes) slots_min += size_class.slot_bytes * size_class.n_slot_min;
    while (rest < slots_min && plan.n_staging > kStagingBuffersMin) {
      --plan.n_staging;
      rest += plan.staging_bytes;
    }
  }
  // First everybody's minimum, then by the bytes of all experts of a class, then what is left over, largest first.
  uint64_t all_bytes = 0;
  for (ClassPlan& size_class : plan.classes) {
    size_class.n_slot = size_class.n_slot_min;
    rest -= size_class.n_slot * size_class.slot_bytes;
    all_bytes += size_class.slot_bytes * (size_class.n_slot_all - size_class.n_slot_min);
  }
  const uint64_t shared = rest;
  for (ClassPlan& size_class : plan.classes) {
    const uint64_t wanted = size_class.slot_bytes * (size_class.n_slot_all - size_class.n_slot_min);
    if (wanted == 0) continue;
    const double share = static_cast<double>(shared) * (static_cast<double>(wanted) / static_cast<double>(all_bytes));
    const uint64_t room = static_cast<uint64_t>(share) / size_class.slot_bytes;
    const uint32_t more = static_cast<uint32_t>(std::min<uint64_t>({room, size_class.n_slot_all - size_class.n_slot, rest / size_class.slot_bytes}));
    size_class.n_slot += more;
    rest -= more * size_class.slot_bytes;
  }
  std::vector<uint32_t> order(plan.classes.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return plan.classes[a].slot_bytes > plan.classes[b].slot_bytes; });
  for (const uint32_t index : order) {
    ClassPlan& size_class = plan.classes[index];
    const uint64_t more = std::min<uint64_t>(rest / size_class.slot_bytes, size_class.n_slot_all - size_class.n_slot);
    size_class.n_slot += static_cast<uint32_t>(more);
    rest -= more * size_class.slot_bytes;
  }
  plan.bytes = plan.n_staging * plan.staging_bytes;
  for (const ClassPlan& size_class : plan.classes) plan.bytes += size_class.n_slot * size_class.slot_bytes;
  return {};
}

LayerSource layer_source(const Catalog& catalog, const ExpertLayer& layer) {
  LayerSource source{.layer = layer.layer, .n_expert = layer.n_expert, .spans = {}, .matrices = {}, .checksums = layer.checksums};
  for (const ExpertSpan& span : layer.spans) {
    source.spans.push_back({.file = catalog.files[span.file],
                            .offset = span.offset,
                            .stride_bytes = span.stride_bytes,
                            .bytes = span.bytes});
  }
  for (const ExpertMatrix& matrix : layer.matrices) {
    source.matrices.push_back({.role = matrix.role,
                               .span = matrix.span,
                               .offset = matrix.offset,
                               .slab_bytes = matrix.shape.slab_bytes});
  }
  return source;
}

std::vector<LayerSource> layer_sources(const Catalog& catalog) {
  std::vector<LayerSource> sources;
  for (const ExpertLayer& layer : catalog.expert_layers) sources.push_back(layer_source(catalog, layer));
  return sources;
}

}  // namespace sluice
