#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "bindings/errors.h"
#include "bindings/handles.h"
#include "checkpoint/image.h"
#include "checkpoint/plain.h"
#include "checkpoint/recovery.h"
#include "checkpoint/saver.h"
#include "checkpoint/shard.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unbroken::bindings {
namespace {

constexpr int kFaultThreads = 2;
constexpr std::uint64_t kMaxFileBytes = 2 * kGiB;

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }
std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

std::string joined(const std::vector<std::string_view>& parts) {
  std::size_t size = 0;
  for (const auto part : parts) size += part.size();
  std::string whole;
  whole.reserve(size);
  for (const auto part : parts) whole += part;
  return whole;
}

Image build(ImageBuilder& builder) {
  const nb::gil_scoped_release released;
  return unwrap(std::move(builder).build(kFaultThreads));
}

void stage(Image& image, const std::vector<std::tuple<std::size_t, std::uintptr_t, std::uint64_t>>& copies,
           int threads) {
  const nb::gil_scoped_release released;
  std::vector<CopyIn> plan;
  plan.reserve(copies.size());
  for (const auto& [slot, address, bytes] : copies) {
    plan.push_back({.slot = slot, .source = reinterpret_cast<const std::byte*>(address), .bytes = bytes});
  }
  unwrap(image.stage(plan, threads));
}

bool place_objects(Image& image, const std::vector<nb::bytes>& archives) {
  std::vector<std::string_view> views;
  for (const auto& archive : archives) views.push_back(view_of(archive));
  return unwrap(image.place_objects(views));
}

void bind_image(nb::module_& module) {
  nb::class_<PlacedSlot>(module, "Slot", "Where one archive lies in a shard file. Bytes.")
      .def_prop_ro("file", [](const PlacedSlot& self) { return self.file; })
      .def_prop_ro(
          "offset", [](const PlacedSlot& self) { return self.slot.offset; }, "Of the archive in the file.")
      .def_prop_ro(
          "length", [](const PlacedSlot& self) { return self.slot.length; }, "Of the archive.")
      .def_prop_ro(
          "data_offset", [](const PlacedSlot& self) { return self.slot.data_offset; },
          "Of the tensor's bytes in the archive; 0 for an object.")
      .def_prop_ro(
          "data_length", [](const PlacedSlot& self) { return self.slot.data_length; },
          "Of the tensor's bytes; 0 for an object.");
  nb::class_<ImageBuilder>(module, "ImageBuilder",
                           "Collects the slots of a rank's image, numbered from 0 as they are added.")
      .def(
          "__init__",
          [](ImageBuilder* self, std::uint64_t rank, std::uint64_t max_file_bytes) {
            new (self) ImageBuilder(rank, max_file_bytes);
          },
          "rank"_a, nb::kw_only(), "max_file_bytes"_a = kMaxFileBytes)
      .def(
          "add_tensor",
          [](ImageBuilder& self, const nb::bytes& head, std::uint64_t data_length, const nb::bytes& tail) {
            return unwrap(self.add_tensor(std::string(view_of(head)), data_length, std::string(view_of(tail))));
          },
          "head"_a, "data_length"_a, "tail"_a, "A slot for a tensor: its archive before and after the tensor's bytes.")
      .def("add_object", &ImageBuilder::add_object, "capacity_hint"_a,
           "A slot for an object whose archive takes so much now.")
      .def("build", &build, "Allocates and pre-faults the memory; the builder is empty afterwards.");
  nb::class_<Image>(module, "Image",
                    "A rank's shard files in memory. One thread at a time; of no use in a forked child.")
      .def_prop_ro("arena_bytes", [](const Image& self) { return self.arena().size(); })
      .def("arena_address", [](const Image& self) { return reinterpret_cast<std::uintptr_t>(self.arena().data()); })
      .def(
          "slot", [](const Image& self, std::size_t number) { return self.slot(number); }, "number"_a)
      .def(
          "address",
          [](const Image& self, std::size_t number) {
            return reinterpret_cast<std::uintptr_t>(self.data(number).data());
          },
          "number"_a, "Where the data of a tensor's slot goes.")
      .def("stage", &stage, "copies"_a, nb::kw_only(), "threads"_a = 2,
           "Copies host memory into slots: (slot number, address, bytes) each. Without the GIL.")
      .def("begin_staging", &Image::begin_staging,
           "Lets a commit begin that writes what stage(), which must follow, has copied so far.")
      .def("place_objects", &place_objects, "archives"_a,
           "Places this save's objects; True when their places changed, so that object_slots() goes into the vote.")
      .def("object_slots", &Image::object_slots, "JSON: slot number -> [offset, length], in object_file().")
      .def("object_file", &Image::object_file_name);
}

PlainNames plain_names(std::optional<std::uint64_t> only_rank) {
  return only_rank ? PlainNames::of_rank(*only_rank) : PlainNames();
}

// Reads go on in engine threads while Python may drop the store, so the reader holds it.
struct ReaderHandle {
  std::shared_ptr<Store> store;
  std::unique_ptr<AttemptReader> reader;
};

ReaderHandle open_reader(const StoreHandle& store, const std::string& attempt, std::optional<std::uint64_t> only_rank) {
  const nb::gil_scoped_release released;
  const PlainNames names = plain_names(only_rank);
  return {.store = store.store,
          .reader = unwrap(AttemptReader::open(*store.store, attempt, names.manifest, names.marker))};
}

std::vector<PlacedSlot> slots_of(const ReaderHandle& self, const std::string& file) {
  const nb::gil_scoped_release released;
  std::vector<PlacedSlot> slots;
  for (const auto& slot : unwrap(self.reader->file(file))->slots) slots.push_back({.file = file, .slot = slot});
  return slots;
}

void read(const ReaderHandle& self,
          const std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t, std::uintptr_t>>& ranges, int threads,
          bool alone) {
  const nb::gil_scoped_release released;
  std::vector<ReadRange> plan;
  plan.reserve(ranges.size());
  for (const auto& [file, offset, length, address] : ranges) {
    plan.push_back({.file = file, .offset = offset, .into = {reinterpret_cast<std::byte*>(address), length}});
  }
  unwrap(self.reader->read(plan, {.threads = threads, .alone = alone}));
}

nb::bytes metadata_of(const ReaderHandle& self) {
  std::string metadata;
  {
    const nb::gil_scoped_release released;
    metadata = unwrap(self.reader->metadata());
  }
  return to_bytes(metadata);
}

std::string find(const StoreHandle& store, std::optional<std::uint64_t> step) {
  const nb::gil_scoped_release released;
  return unwrap(find_attempt(*store.store, step)).name;
}

void bind_reader(nb::module_& module) {
  nb::class_<ReaderHandle>(module, "AttemptReader",
                           "Verified reads of one attempt. Thread-safe; blocks without the GIL.")
      .def(
          "__init__",
          [](ReaderHandle* self, const StoreHandle& store, const std::string& attempt,
             std::optional<std::uint64_t> only_rank) {
            new (self) ReaderHandle(open_reader(store, attempt, only_rank));
          },
          "store"_a, "attempt"_a, nb::kw_only(), "only_rank"_a = nb::none())
      .def(
          "manifest", [](const ReaderHandle& self) { return manifest_body(self.reader->manifest()); },
          "The root of the manifest, as JSON.")
      .def("metadata", &metadata_of, "The bytes of `.metadata`, verified.")
      .def("slots", &slots_of, "file"_a, "The archives in a shard file, by rising offset.")
      .def("read", &read, "ranges"_a, nb::kw_only(), "threads"_a = 2, "alone"_a = false,
           "Fills memory from (file, offset, length, address) each. Every chunk touched is verified before it returns; "
           "DamagedError names file and bytes. alone: no other process of this machine is about to read the same.");
  module.def("find_attempt", &find, "store"_a, "step"_a = nb::none(),
             "The directory of the newest complete checkpoint on the run's branch (of that step). Claims nothing.");
}

Verdict verdict_of(const std::string& name) {
  if (name == "loaded") return Verdict::kLoaded;
  if (name == "damaged") return Verdict::kDamaged;
  if (name == "unreachable") return Verdict::kUnreachable;
  if (name == "failed") return Verdict::kFailed;
  throw EngineException(
      make_error(Code::kInvalidArgument, "a verdict is loaded, damaged, unreachable or failed, not " + name));
}

struct RecoveryHandle {
  std::shared_ptr<Store> store;
  BoardHandle board;
  Recovery recovery;

  RecoveryHandle(const StoreHandle& store_handle, nb::object board_object, RecoveryOptions options)
      : store(store_handle.store), board(std::move(board_object)), recovery(*store, *board.board, std::move(options)) {}
};

void bind_recovery(nb::module_& module) {
  nb::class_<Start>(module, "Start", "What a start decided; the same on all ranks.")
      .def_ro("generation", &Start::generation)
      .def_ro("run_id", &Start::run_id)
      .def_ro("life_id", &Start::life_id)
      .def_ro("fresh", &Start::fresh)
      .def_prop_ro("step", [](const Start& self) { return self.key.step; })
      .def_ro("attempt", &Start::attempt, "The checkpoint's directory; empty when fresh.")
      .def_ro("manifest", &Start::manifest, "The root of its manifest, as JSON; empty when fresh.")
      .def_prop_ro(
          "refused",
          [](const Start& self) {
            std::vector<std::tuple<std::string, std::string>> refused;
            for (const auto& refusal : self.refused) refused.emplace_back(refusal.attempt, refusal.reason);
            return refused;
          },
          "(attempt, reason) of each checkpoint that this start refused.")
      .def_ro("account", &Start::account, "What was chosen and why, in sentences.")
      .def_prop_ro(
          "warnings", [](const Start& self) { return self.warnings; },
          "What the user must hear of although the start went well.");
  nb::class_<RecoveryHandle>(module, "Recovery", "One start of a run, on one rank. The training thread only.")
      .def(
          "__init__",
          [](RecoveryHandle* self, const StoreHandle& store, nb::object board, std::uint64_t rank,
             std::uint64_t world_size, const std::string& host, std::optional<std::uint64_t> step, bool allow_fresh,
             double timeout_seconds) {
            new (self) RecoveryHandle(store, std::move(board),
                                      {.rank = rank,
                                       .world_size = world_size,
                                       .host = host,
                                       .step = step,
                                       .allow_fresh = allow_fresh,
                                       .timeout_seconds = timeout_seconds});
          },
          "store"_a, "board"_a, nb::kw_only(), "rank"_a, "world_size"_a, "host"_a, "step"_a = nb::none(),
          "allow_fresh"_a = false, "timeout_seconds"_a = 300.0)
      .def(
          "begin",
          [](RecoveryHandle& self) {
            const nb::gil_scoped_release released;
            return unwrap(self.recovery.begin());
          },
          "Chooses, and records the new life; the same answer on all ranks.")
      .def(
          "settle",
          [](RecoveryHandle& self, const std::string& verdict, const std::string& reason) {
            const Verdict parsed = verdict_of(verdict);
            const nb::gil_scoped_release released;
            return unwrap(self.recovery.settle(parsed, reason));
          },
          "verdict"_a, "reason"_a = "",
          "After the load, on all ranks. None: go on. A Start: drop what was loaded and load that. Raises: all stop.");
}

struct SaverHandle {
  std::shared_ptr<Store> store;
  BoardHandle board;
  Saver saver;

  SaverHandle(const StoreHandle& store_handle, nb::object board_object, const Start& start, SaverOptions options)
      : store(store_handle.store), board(std::move(board_object)), saver(*store, *board.board, start, options) {}
};

using Slots = std::vector<std::optional<std::string>>;

// `.metadata` is made in Python, on the engine's thread, in parts. They can be many MiB, and hardly differ from save to
// save: Python keeps them, and they are joined without the GIL.
auto metadata_maker(const nb::object& callback) {
  return [&callback](std::span<const std::optional<std::string>> slots) -> Result<std::string> {
    const nb::gil_scoped_acquire acquired;
    try {
      const auto parts = nb::cast<std::vector<nb::bytes>>(callback(Slots(slots.begin(), slots.end())));
      std::vector<std::string_view> views;
      for (const auto& part : parts) views.push_back(view_of(part));
      const nb::gil_scoped_release released;
      return joined(views);
    } catch (nb::python_error& raised) {
      return error_of_python(raised, "make .metadata", Code::kInvalidArgument);
    } catch (const std::exception& exception) {
      return make_error(Code::kInternal, std::string("make .metadata: ") + exception.what());
    }
  };
}

SaveOutcome commit(SaverHandle& self, const Image* image, std::uint64_t step, const std::string& attempt,
                   std::uint64_t sequence, const std::string& structure, const std::optional<std::string>& object_slots,
                   const nb::object& metadata, const std::string& mesh, const std::string& loader,
                   const std::string& versions, const std::string& failure) {
  SaveRequest request{.key = {.step = step, .generation = 0, .sequence = sequence},
                      .attempt = attempt,
                      .parent = {},
                      .structure = structure,
                      .object_slots = object_slots,
                      .failure = failure,
                      .metadata = metadata_maker(metadata),
                      .mesh = mesh,
                      .loader = loader,
                      .versions = versions};
  const nb::gil_scoped_release released;
  return self.saver.commit(image, std::move(request));
}

void bind_saver(nb::module_& module) {
  nb::class_<StepDecision>(module, "StepDecision", "What happens at the end of a step; the same on all ranks.")
      .def_prop_ro(
          "action", [](const StepDecision& self) { return std::string(action_name(self.action)); },
          "none, save, deferred, or stop (save now, then leave).")
      .def_ro("attempt", &StepDecision::attempt)
      .def_ro("sequence", &StepDecision::sequence)
      .def_ro("plan_anew", &StepDecision::plan_anew, "All ranks plan anew before this save.");
  nb::class_<SaveOutcome>(module, "SaveOutcome", "What became of one save.")
      .def_prop_ro(
          "state", [](const SaveOutcome& self) { return std::string(outcome_name(self.state)); },
          "durable, failed or unknown.")
      .def_prop_ro(
          "code", [](const SaveOutcome& self) { return std::string(code_name(self.code)); }, "The kind of a failure.")
      .def_ro("reason", &SaveOutcome::reason, "Empty when durable; names ranks and causes.")
      .def_ro("attempt_path", &SaveOutcome::attempt_path)
      .def_ro("bytes", &SaveOutcome::bytes, "Written by this rank.")
      .def_ro("write_seconds", &SaveOutcome::write_seconds)
      .def_ro("commit_seconds", &SaveOutcome::commit_seconds)
      .def_ro("structure_differs", &SaveOutcome::structure_differs, "The next save must plan anew.");
  nb::class_<SaverHandle>(module, "Saver", "The saves of one life on one rank.")
      .def(
          "__init__",
          [](SaverHandle* self, const StoreHandle& store, nb::object board, const Start& start, std::uint64_t rank,
             std::uint64_t world_size, std::uint64_t keep_last, std::uint64_t keep_every_steps,
             double vote_timeout_seconds, double decision_timeout_seconds, std::uint64_t steps_ahead) {
            new (self) SaverHandle(store, std::move(board), start,
                                   {.rank = rank,
                                    .world_size = world_size,
                                    .keep = {.last = keep_last, .every_steps = keep_every_steps},
                                    .vote_timeout_seconds = vote_timeout_seconds,
                                    .decision_timeout_seconds = decision_timeout_seconds,
                                    .steps_ahead = steps_ahead});
          },
          "store"_a, "board"_a, "start"_a, nb::kw_only(), "rank"_a, "world_size"_a, "keep_last"_a = 0,
          "keep_every_steps"_a = 0, "vote_timeout_seconds"_a = 600.0, "decision_timeout_seconds"_a = 60.0,
          "steps_ahead"_a = 1)
      .def(
          "decide",
          [](SaverHandle& self, std::uint64_t step, bool due, bool wanted, bool stop, bool busy, bool is_explicit,
             bool plan_anew) {
            const nb::gil_scoped_release released;
            return unwrap(self.saver.decide(step, {.due = due,
                                                   .wanted = wanted,
                                                   .stop = stop,
                                                   .busy = busy,
                                                   .is_explicit = is_explicit,
                                                   .plan_anew = plan_anew}));
          },
          "step"_a, nb::kw_only(), "due"_a, "wanted"_a = false, "stop"_a = false, "busy"_a = false,
          "explicit"_a = false, "plan_anew"_a = false,
          "At the end of every step, on every rank, on the training thread.")
      .def("commit", &commit, "image"_a.none(), nb::kw_only(), "step"_a, "attempt"_a, "sequence"_a, "structure"_a,
           "object_slots"_a = nb::none(), "metadata"_a = nb::none(), "mesh"_a = "null", "loader"_a = "null",
           "versions"_a = "{}", "failure"_a = "",
           "Writes, votes, commits; blocks, without the GIL, until the outcome is known. metadata, on the coordinator: "
           "given what each vote says of places, the bytes of `.metadata`, in a list of parts.")
      .def(
          "retain",
          [](SaverHandle& self) {
            const nb::gil_scoped_release released;
            return unwrap(self.saver.retain());
          },
          "After a durable save: removes what need not be kept; returns the directories.")
      .def(
          "cancel", [](SaverHandle& self) { self.saver.cancel(); },
          "The process leaves: a save in flight waits for nobody any more. Any thread.");
}

}  // namespace

namespace {

void bind_plain(nb::module_& module) {
  module.def(
      "prepare_plain",
      [](const StoreHandle& store, bool overwrite, std::optional<std::uint64_t> only_rank) {
        const nb::gil_scoped_release released;
        unwrap(prepare_plain(*store.store, plain_names(only_rank), overwrite));
      },
      "store"_a, nb::kw_only(), "overwrite"_a, "only_rank"_a = nb::none(),
      "Makes way for a checkpoint in the store's root; AlreadyExistsError when one is there and may not be replaced.");
  module.def(
      "write_plain_rank",
      [](const StoreHandle& store, const Image& image, int threads) {
        const nb::gil_scoped_release released;
        unwrap(write_plain_rank(*store.store, image, threads));
      },
      "store"_a, "image"_a, nb::kw_only(), "threads"_a = 2, "Writes one rank's files, durable.");
  module.def(
      "commit_plain",
      [](const StoreHandle& store, const nb::bytes& marker, std::uint64_t world_size,
         std::optional<std::uint64_t> only_rank, const std::string& versions) {
        const std::string content(view_of(marker));
        const nb::gil_scoped_release released;
        unwrap(commit_plain(
            *store.store,
            {.names = plain_names(only_rank), .world_size = world_size, .only_rank = only_rank, .versions = versions},
            content));
      },
      "store"_a, "marker"_a, nb::kw_only(), "world_size"_a, "only_rank"_a = nb::none(), "versions"_a = "{}",
      "When all ranks have written: publishes the manifest and `.metadata`.");
}

}  // namespace

void bind_checkpoint(nb::module_& module) {
  bind_plain(module);
  bind_image(module);
  bind_reader(module);
  bind_recovery(module);
  bind_saver(module);
}

}  // namespace unbroken::bindings
