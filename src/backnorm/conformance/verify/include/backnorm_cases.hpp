// Reads the cases that `backnorm cases export` wrote as raw files, and judges results. C++17.
//
//   for (const auto &c : backnorm::cases("cases")) {
//     std::vector<float> dx(c.size("dx"));
//     my_backward(c.data<float>("x"), c.data<float>("dy"), ..., dx.data());
//     EXPECT_TRUE(c.within("dx", dx.data(), backnorm::float32)) << c.why();
//   }
#ifndef BACKNORM_CASES_HPP
#define BACKNORM_CASES_HPP

#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace backnorm {

// The rungs of the ladder, best first.
enum rung { exact, float64, float32, pairwise, blocked, serial };

inline const char *name_of(rung r) {
  static const char *names[] = {"exact", "float64", "float32", "pairwise", "blocked", "serial"};
  return names[r];
}

struct array {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<char> bytes;

  std::size_t size() const {
    std::size_t n = 1;
    for (auto s : shape) n *= static_cast<std::size_t>(s);
    return n;
  }
};

// An element as a double, of float64, float32, float16 or bfloat16.
inline double element(const char *bytes, const std::string &dtype, std::size_t i) {
  if (dtype == "float64") { double v; std::memcpy(&v, bytes + 8 * i, 8); return v; }
  if (dtype == "float32") { float v; std::memcpy(&v, bytes + 4 * i, 4); return v; }
  std::uint16_t h;
  std::memcpy(&h, bytes + 2 * i, 2);
  if (dtype == "bfloat16") {
    std::uint32_t w = static_cast<std::uint32_t>(h) << 16;
    float v; std::memcpy(&v, &w, 4); return v;
  }
  int e = (h >> 10) & 31, f = h & 1023;
  double s = (h >> 15) ? -1.0 : 1.0;
  if (e == 31) return f ? std::numeric_limits<double>::quiet_NaN()
                        : s * std::numeric_limits<double>::infinity();
  return s * (e ? std::ldexp(1024 + f, e - 25) : std::ldexp(f, -24));
}

class test_case {
 public:
  std::string name;
  bool training = true;
  int channel_axis = 1;
  double epsilon = 0.0;

  bool has(const std::string &role) const { return arrays_.count(role) != 0; }

  const array &get(const std::string &role) const {
    auto found = arrays_.find(role);
    if (found == arrays_.end()) throw std::out_of_range(name + " has no " + role);
    if (found->second.bytes.empty() && found->second.size()) load(role, found->second);
    return found->second;
  }

  std::size_t size(const std::string &role) const { return get(role).size(); }

  template <class T> const T *data(const std::string &role) const {
    return has(role) ? reinterpret_cast<const T *>(get(role).bytes.data()) : nullptr;
  }

  // Whether every element of an output ("dx", "dgamma", "dbeta") is within the bound of a rung.
  // `got` has the type of the output, as get(output).dtype says.
  bool within(const std::string &output, const void *got, rung r) const {
    const array &right = get(output);
    r = known(output, r);
    const array &hi = get(output + ".high"), &lo = get(output + ".low"),
                &bound = get(output + "." + name_of(r));
    for (std::size_t i = 0; i < right.size(); ++i) {
      double g = element(static_cast<const char *>(got), right.dtype, i);
      double h = element(hi.bytes.data(), "float64", i), l = element(lo.bytes.data(), "float64", i);
      double e = element(right.bytes.data(), right.dtype, i);
      double b = element(bound.bytes.data(), "float64", i);
      if (g == e || (std::isnan(g) && std::isnan(e))) continue;
      double error = std::fabs((g - h) - l);
      if (error <= b) continue;
      std::ostringstream text;
      text.precision(17);
      text << name << " " << output << "[" << i << "] = " << g << ", exact " << h << ", error "
           << error << ", allowed " << b << " (" << name_of(r) << ")";
      why_ = text.str();
      return false;
    }
    return true;
  }

  // The rung itself, or the next worse one that has bounds: float64 has no rung float32, and there
  // is no bound for 2**24 additions in a row.
  rung known(const std::string &output, rung r) const {
    for (int k = r; k <= serial; ++k)
      if (has(output + "." + name_of(static_cast<rung>(k)))) return static_cast<rung>(k);
    for (int k = r; k > exact; --k)
      if (has(output + "." + name_of(static_cast<rung>(k)))) return static_cast<rung>(k);
    return exact;
  }

  // The first element that was not within its bound.
  const std::string &why() const { return why_; }

 private:
  std::string folder_;
  mutable std::map<std::string, array> arrays_;
  mutable std::string why_;

  void load(const std::string &role, array &a) const {
    std::size_t width = a.dtype == "float64" ? 8 : a.dtype == "float32" ? 4 : 2;
    a.bytes.resize(a.size() * width);
    std::ifstream file(folder_ + "/" + name + "/" + role + ".bin", std::ios::binary);
    if (!file.read(a.bytes.data(), static_cast<std::streamsize>(a.bytes.size())))
      throw std::runtime_error("cannot read " + role + " of " + name);
  }

  friend std::vector<test_case> cases(const std::string &folder);
};

// All cases of a folder, in the order of the manifest.
inline std::vector<test_case> cases(const std::string &folder) {
  std::ifstream file(folder + "/manifest.tsv");
  if (!file) throw std::runtime_error("cannot read " + folder + "/manifest.tsv");
  std::vector<test_case> found;
  std::string line;
  while (std::getline(file, line)) {
    std::vector<std::string> part;
    std::istringstream cells(line);
    for (std::string cell; std::getline(cells, cell, '\t');) part.push_back(cell);
    if (part[1] == "call") {
      test_case c;
      c.name = part[0];
      c.folder_ = folder;
      c.training = part[2] == "1";
      c.channel_axis = std::stoi(part[3]);
      c.epsilon = std::strtod(part[4].c_str(), nullptr);
      found.push_back(c);
      continue;
    }
    array a;
    a.dtype = part[2];
    if (part.size() > 3 && !part[3].empty()) {
      std::istringstream sizes(part[3]);
      for (std::string s; std::getline(sizes, s, 'x');) a.shape.push_back(std::stoll(s));
    }
    found.back().arrays_[part[1]] = a;
  }
  return found;
}

}  // namespace backnorm
#endif
