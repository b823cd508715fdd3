// What a measured run is worth: gate first, then significance, then tier.
#pragma once

#include <string>

namespace k3 {

// A gain below this is noise: runs of one program differ by 1 to 1.5 % (results/ladder.md).
inline constexpr double kSignificant = 0.02;

struct Tier {
  const char* name;
  double min_gain;  // 0.1: 10 % faster
};
inline constexpr Tier kTiers[] = {
    {"XL", 0.50}, {"L", 0.25}, {"M", 0.10}, {"S", 0.05}, {"XS", kSignificant}};
const char* tier_of(double gain);  // "none" below all

// The verdict of one run against the others in its folder: a table for people and one line RESULT_JSON. Throws
// std::invalid_argument where the run measures nothing that a slot holds.
std::string verdict(const std::string& path);

}  // namespace k3
