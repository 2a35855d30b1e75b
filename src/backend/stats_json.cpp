#include "backend/stats_json.h"

#include <cstddef>

namespace sluice {

namespace {

// The layers of which `total` has counted something: others are dense, or none of their experts was asked for yet.
template <typename Counters>
nlohmann::json by_layer(const std::vector<Counters>& layers, uint64_t Counters::*total, nlohmann::json (*to_json)(const Counters&)) {
  nlohmann::json json = nlohmann::json::array();
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    if (layers[layer].*total == 0) continue;
    nlohmann::json entry = to_json(layers[layer]);
    entry["layer"] = layer;
    json.push_back(std::move(entry));
  }
  return json;
}

nlohmann::json counters_json(const ExpertCounters& counters) {
  return {
      {"requests", counters.requests}, {"hits", counters.hits},
      {"misses", counters.misses},     {"hit_rate", counters.hit_rate()},
      {"loads", counters.loads},       {"evictions", counters.evictions},
      {"unplaced", counters.unplaced}, {"bytes_read", counters.bytes_read},
  };
}

const char* view_name(PredictionView view) {
  switch (view) {
    case PredictionView::kBeforeAttention: return "before_attention";
    case PredictionView::kBlockInput: return "block_input";
    case PredictionView::kLastToken: return "last_token";
  }
  return "";
}

nlohmann::json prefetch_counters_json(const PrefetchCounters& counters) {
  return {
      {"predicted", counters.predicted},
      {"submitted", counters.submitted},
      {"refused", counters.refused},
      {"late", counters.late},
      {"materialised", counters.materialised},
      {"failed", counters.failed},
      {"cancelled", counters.cancelled},
      {"taken", counters.taken()},
      {"ready_on_time", counters.ready_on_time},
      {"not_ready", counters.not_ready},
      {"bytes", counters.bytes},
      {"bytes_wasted", counters.bytes > counters.bytes_taken ? counters.bytes - counters.bytes_taken : 0},
      {"seconds", counters.seconds},
      {"hidden_s", counters.hidden_s},
  };
}

nlohmann::json prefetch_json(const EngineStats& stats) {
  nlohmann::json recall = nlohmann::json::array();
  for (const RecallCounts& counts : stats.recall) {
    const auto wanted = static_cast<double>(counts.wanted);
    recall.push_back({{"view", view_name(counts.view)},
                      {"distance", counts.distance},
                      {"layer", counts.layer},
                      {"wanted", counts.wanted},
                      {"at_1x", static_cast<double>(counts.found_at_1x) / wanted},
                      {"at_1_5x", static_cast<double>(counts.found_at_1_5x) / wanted},
                      {"at_2x", static_cast<double>(counts.found_at_2x) / wanted}});
  }
  nlohmann::json json = prefetch_counters_json(stats.prefetch);
  json["mode"] = stats.prefetch_mode;
  json["rows_dropped"] = stats.prefetch_rows_dropped;
  json["trials"] = stats.prefetch_trials;
  json["switches"] = stats.prefetch_switches;
  json["lens_s"] = stats.prefetch_lens_s;
  json["lens_bytes"] = stats.prefetch_lens_bytes;
  json["layers"] = by_layer(stats.prefetch_layers, &PrefetchCounters::predicted, prefetch_counters_json);
  json["recall"] = std::move(recall);
  return json;
}

}  // namespace

nlohmann::json engine_stats_json(const EngineStats& stats) {
  nlohmann::json drives = nlohmann::json::array();
  for (const DriveStats& drive : stats.io_drives) {
    drives.push_back({{"path", drive.path},
                      {"reads", drive.reads},
                      {"bytes", drive.bytes},
                      {"errors", drive.errors},
                      {"mb_per_s", drive.mb_per_s},
                      {"dropped", drive.dropped}});
  }

  nlohmann::json json;
  json["streaming"] = stats.streaming;
  json["model"] = stats.model;
  json["budget_bytes"] = stats.budget_bytes;
  json["budget_bytes_min"] = stats.budget_bytes_min;
  json["expert_bytes"] = stats.expert_bytes;
  json["slots"] = stats.slots;
  json["policy"] = stats.policy;
  json["experts"] = counters_json(stats.experts);
  json["io"] = {
      {"path", stats.io_path},     {"direct", stats.io_direct},   {"reads", stats.io_reads},
      {"bytes", stats.io_bytes},   {"seconds", stats.io_seconds}, {"retries", stats.io_retries},
      {"errors", stats.io_errors}, {"drives", std::move(drives)},
  };
  json["prefetch"] = prefetch_json(stats);
  json["time"] = {{"route_sync_s", stats.route_sync_s},
                  {"stall_s", stats.stall_s},
                  {"staging_s", stats.staging_s},
                  {"compute_s", stats.compute_s},
                  {"scatter_s", stats.scatter_s}};
  json["compute"] = {
      {"fused_blocks", stats.fused_blocks}, {"generic_blocks", stats.generic_blocks}, {"lone_blocks", stats.lone_blocks}};
  json["verified"] = {{"slots", stats.verified_slots}, {"reads", stats.verified_reads}};
  json["memory"] = {{"pool_bytes", stats.pool_bytes}, {"pool_shrinks", stats.pool_shrinks}, {"pool_grows", stats.pool_grows}};
  json["layers"] = by_layer(stats.layers, &ExpertCounters::requests, counters_json);
  return json;
}

}  // namespace sluice
