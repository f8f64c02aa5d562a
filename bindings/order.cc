#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "order/permutation.h"
#include "order/schedule.h"
#include "order/seeds.h"
#include "order/share.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unbroken::bindings {
namespace {

using Indices = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

void require_below(const char* what, std::uint64_t index, std::uint64_t limit) {
  if (index < limit) return;
  throw EngineException(make_error(Code::kInvalidArgument,
                                   fmt::format("{} {} is not one of a dataset of {} samples", what, index, limit)));
}

Indices fill(const order::Permutation& permutation, std::uint64_t offset, std::uint64_t count) {
  if (offset > permutation.samples() || count > permutation.samples() - offset) {
    throw EngineException(
        make_error(Code::kInvalidArgument, fmt::format("places {} to {} are not all of a dataset of {} samples", offset,
                                                       offset + count, permutation.samples())));
  }
  auto values = std::make_unique_for_overwrite<std::uint64_t[]>(count);
  std::uint64_t* data = values.get();
  const nb::capsule owner(values.release(),
                          [](void* memory) noexcept { delete[] static_cast<std::uint64_t*>(memory); });
  {
    const nb::gil_scoped_release released;
    permutation.fill(offset, std::span(data, count));
  }
  // Samples are below 2^62, so the signed view that numpy and torch index with shows the same numbers.
  return Indices(data, {count}, owner);
}

using PlaceTuple = std::pair<std::uint64_t, std::uint64_t>;
using SeedTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;

PlaceTuple to_tuple(order::Place place) { return {place.epoch, place.offset}; }

SeedTuple to_tuple(const order::RandomSeeds& seeds) {
  return {seeds.python, seeds.numpy, seeds.torch, seeds.generator};
}

void bind_permutation(nb::module_& module) {
  nb::class_<order::Permutation>(module, "Permutation",
                                 "The order of one epoch: a bijection of [0, samples), keyed by seed and epoch.")
      .def(
          "__init__",
          [](order::Permutation* self, std::uint64_t seed, std::uint64_t epoch, std::uint64_t samples) {
            new (self) order::Permutation(
                unwrap(order::Permutation::make({.seed = seed, .epoch = epoch, .samples = samples})));
          },
          "seed"_a, "epoch"_a, "samples"_a)
      .def_prop_ro("samples", &order::Permutation::samples)
      .def(
          "__call__",
          [](const order::Permutation& self, std::uint64_t place) {
            require_below("place", place, self.samples());
            return self(place);
          },
          "place"_a, "The sample at a place of the epoch.")
      .def(
          "inverse",
          [](const order::Permutation& self, std::uint64_t sample) {
            require_below("sample", sample, self.samples());
            return self.inverse(sample);
          },
          "sample"_a, "The place at which a sample comes.")
      .def("fill", &fill, "offset"_a, "count"_a, "The samples at offset, offset + 1, ...: int64, shape (count,).");
}

void bind_schedule(nb::module_& module) {
  nb::class_<order::Schedule>(module, "Schedule", "Where global batches begin and end.")
      .def(
          "__init__",
          [](order::Schedule* self, std::uint64_t samples, std::uint64_t global_batch_size,
             const std::string& epoch_end) {
            new (self) order::Schedule(
                unwrap(order::Schedule::make({.samples = samples,
                                              .global_batch_size = global_batch_size,
                                              .epoch_end = unwrap(order::parse_epoch_end(epoch_end))})));
          },
          "samples"_a, "global_batch_size"_a, "epoch_end"_a)
      .def(
          "settle",
          [](const order::Schedule& self, std::uint64_t epoch, std::uint64_t offset) {
            return to_tuple(unwrap(self.settle({.epoch = epoch, .offset = offset})));
          },
          "epoch"_a, "offset"_a, "The place at which the next batch starts, as (epoch, offset).")
      .def(
          "batch_at",
          [](const order::Schedule& self, std::uint64_t epoch, std::uint64_t offset) {
            const order::Place start = unwrap(self.settle({.epoch = epoch, .offset = offset}));
            const order::GlobalBatch batch = self.batch_at(start);
            return std::pair(batch.samples, to_tuple(batch.next));
          },
          "epoch"_a, "offset"_a, "The batch at a place: (samples, (epoch, offset) of the batch after it).")
      .def(
          "ranges",
          [](const order::Schedule& self, std::uint64_t epoch, std::uint64_t offset, std::uint64_t skip,
             std::uint64_t count) {
            std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>> tuples;
            for (const order::Range& range : self.ranges({.epoch = epoch, .offset = offset}, skip, count)) {
              tuples.emplace_back(range.start.epoch, range.start.offset, range.count);
            }
            return tuples;
          },
          "epoch"_a, "offset"_a, "skip"_a, "count"_a,
          "The count places after the first skip from a place, as (epoch, offset, count) of neighbours.")
      .def_prop_ro("batches_per_epoch", &order::Schedule::batches_per_epoch)
      .def(
          "batches_left",
          [](const order::Schedule& self, std::uint64_t epoch, std::uint64_t offset) {
            return self.batches_left(unwrap(self.settle({.epoch = epoch, .offset = offset})));
          },
          "epoch"_a, "offset"_a, "Batches that start in the epoch of a place, from there on.");
}

void bind_share(nb::module_& module) {
  nb::class_<order::Share>(module, "Share", "Which part of a global batch one data-parallel rank takes.")
      .def(
          "__init__",
          [](order::Share* self, std::uint64_t global_batch_size, std::uint32_t ranks, std::uint32_t rank,
             std::uint32_t micro_batches, bool balanced) {
            new (self) order::Share(unwrap(order::Share::make({.global_batch_size = global_batch_size,
                                                               .ranks = ranks,
                                                               .rank = rank,
                                                               .micro_batches = micro_batches,
                                                               .balanced = balanced})));
          },
          nb::kw_only(), "global_batch_size"_a, "ranks"_a, "rank"_a, "micro_batches"_a, "balanced"_a)
      .def(
          "of",
          [](const order::Share& self, std::uint64_t samples) {
            const order::Part part = self.of(samples);
            return std::pair(part.first, part.count);
          },
          "samples"_a, "This rank's part of a batch of that many samples, as (first, count).")
      .def(
          "micro_batches",
          [](const order::Share& self, std::uint64_t samples) {
            std::vector<std::pair<std::uint64_t, std::uint64_t>> parts;
            for (const order::Part& part : self.micro_batches(samples)) parts.emplace_back(part.first, part.count);
            return parts;
          },
          "samples"_a, "The same part, cut into micro-batches.");
}

}  // namespace

void bind_order(nb::module_& module) {
  bind_permutation(module);
  bind_schedule(module);
  bind_share(module);
  module.def(
      "sample_seeds",
      [](std::uint64_t seed, std::uint64_t epoch, std::uint64_t sample) {
        return to_tuple(order::random_seeds(order::sample_seed({.seed = seed, .epoch = epoch, .sample = sample})));
      },
      "seed"_a, "epoch"_a, "sample"_a, "64-bit seeds of a sample's generators: (python, numpy, torch, own).");
  module.def(
      "batch_seeds",
      [](std::uint64_t seed, std::uint64_t epoch, std::uint64_t offset, std::uint64_t share) {
        return to_tuple(
            order::random_seeds(order::batch_seed({.seed = seed, .epoch = epoch, .offset = offset, .share = share})));
      },
      "seed"_a, "epoch"_a, "offset"_a, "share"_a, "64-bit seeds of a batch's generators: (python, numpy, torch, own).");
}

}  // namespace unbroken::bindings
