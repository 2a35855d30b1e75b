#include "predict/prefetch_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <sstream>
#include <string_view>

namespace sluice {

namespace {

template <typename Number>
bool parse_number(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

// "A" or "A-B".
bool parse_range(std::string_view text, std::pair<uint32_t, uint32_t>& range) {
  const size_t dash = text.find('-');
  if (!parse_number(text.substr(0, dash), range.first)) return false;
  if (dash == std::string_view::npos) {
    range.second = range.first;
    return true;
  }
  return parse_number(text.substr(dash + 1), range.second) && range.first <= range.second;
}

// "LO" or "LO/HI@CUTOFF".
bool parse_ahead(std::string_view text, LookAheadOptions& ahead) {
  const size_t slash = text.find('/');
  if (!parse_number(text.substr(0, slash), ahead.ahead_lo) || ahead.ahead_lo == 0) return false;
  if (slash == std::string_view::npos) {
    ahead.ahead_hi = ahead.ahead_lo;
    return true;
  }
  const size_t at = text.find('@', slash);
  return at != std::string_view::npos && parse_number(text.substr(slash + 1, at - slash - 1), ahead.ahead_hi) &&
         ahead.ahead_hi > 0 && parse_number(text.substr(at + 1), ahead.cutoff);
}

bool parse_layers(const std::string& text, std::vector<std::pair<uint32_t, uint32_t>>& layers) {
  std::stringstream list(text);
  for (std::string word; std::getline(list, word, ':');) {
    if (!parse_range(word, layers.emplace_back())) return false;
  }
  return !layers.empty();
}

}  // namespace

bool PrefetchPlan::allows(uint32_t layer) const {
  return layers.empty() || std::any_of(layers.begin(), layers.end(), [&](const auto& range) {
           return range.first <= layer && layer <= range.second;
         });
}

Result<PrefetchPlan> parse_prefetch_plan(const std::string& text) {
  PrefetchPlan plan;
  std::set<std::string> seen;
  std::stringstream list(text);
  for (std::string word; std::getline(list, word, ',');) {
    const size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    bool ok = seen.insert(key).second;
    if (key == "ahead") {
      ok = ok && parse_ahead(value, plan.ahead);
    } else if (key == "mult") {
      ok = ok && parse_number(value, plan.mult) && plan.mult > 0 && plan.mult <= 16;
    } else if (key == "min_score") {
      ok = ok && parse_number(value, plan.min_score) && std::isfinite(plan.min_score);
    } else if (key == "layer_max") {
      ok = ok && parse_number(value, plan.layer_max);
    } else if (key == "forward_max") {
      ok = ok && parse_number(value, plan.forward_max);
    } else if (key == "layers") {
      ok = ok && parse_layers(value, plan.layers);
    } else {
      ok = false;
    }
    if (!ok) {
      return make_error(
          ErrorCode::kBadArgument,
          "prefetch_plan: wanted ahead=LO[/HI@CUTOFF], mult=X, min_score=X, layer_max=N, forward_max=N or "
          "layers=A-B:C, given '{}'",
          word);
    }
  }
  return plan;
}

uint32_t PrefetchBudget::wanted(uint32_t top_k) const {
  return static_cast<uint32_t>(std::ceil(plan_.mult * top_k));
}

void PrefetchBudget::take(uint32_t source, uint32_t target, std::span<const std::vector<ExpertScore>> rows,
                          std::vector<uint32_t>& experts) {
  if (last_source_ != UINT32_MAX && source <= last_source_) taken_in_forward_ = 0;
  last_source_ = source;
  if (!plan_.allows(target)) return;
  size_t longest = 0;
  for (const auto& row : rows) longest = std::max(longest, row.size());
  const size_t first = experts.size();
  for (size_t place = 0; place < longest; ++place) {
    for (const auto& row : rows) {
      if (place >= row.size() || row[place].score < plan_.min_score) continue;
      if (plan_.layer_max > 0 && experts.size() - first >= plan_.layer_max) return;
      if (plan_.forward_max > 0 && taken_in_forward_ >= plan_.forward_max) return;
      if (std::find(experts.begin() + static_cast<std::ptrdiff_t>(first), experts.end(), row[place].expert) !=
          experts.end()) {
        continue;
      }
      experts.push_back(row[place].expert);
      ++taken_in_forward_;
    }
  }
}

}  // namespace sluice
