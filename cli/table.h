// Columns of text for stdout.
#pragma once

#include <string>
#include <vector>

#include "cli/terminal.h"

namespace unbroken::cli {

class Table {
 public:
  struct Column {
    std::string title;
    bool is_number = false;  // aligned at the right
  };
  struct Cell {
    std::string text{};  // made printable
    Tone tone = Tone::kPlain;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  // As many cells as there are columns.
  void add(std::vector<Cell> cells);
  void print() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

}  // namespace unbroken::cli
