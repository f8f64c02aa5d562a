// What the parts of the binding share: how engine objects that others depend on are held.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "base/board.h"
#include "store/store.h"

namespace unbroken::bindings {

// unbroken._engine.Store. Readers, savers and recoveries keep the store alive.
struct StoreHandle {
  std::shared_ptr<Store> store;
};

// A board that a Python object gives, kept alive with it.
struct BoardHandle {
  nanobind::object owner;
  Board* board = nullptr;

  explicit BoardHandle(nanobind::object object) : owner(std::move(object)), board(nanobind::cast<Board*>(owner)) {}
};

}  // namespace unbroken::bindings
