#include "cli/table.h"

#include <algorithm>
#include <cstdio>

#include "base/error.h"

namespace unbroken::cli {

void Table::add(std::vector<Cell> cells) {
  UNBROKEN_ASSERT(cells.size() == columns_.size());
  for (auto& cell : cells) cell.text = printable(cell.text);
  rows_.push_back(std::move(cells));
}

void Table::print() const {
  std::vector<std::size_t> widths;
  for (const auto& column : columns_) widths.push_back(width_of(column.title));
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width_of(row[i].text));
  }
  const auto print_row = [&](const auto& cell_of) {
    std::string line;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      const Cell cell = cell_of(i);
      const std::string padding(widths[i] - width_of(cell.text), ' ');
      const std::string text = paint(stdout, cell.tone, cell.text);
      if (i > 0) line += "  ";
      line += columns_[i].is_number ? padding + text : text + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    cli::print(line + "\n");
  };
  print_row([&](std::size_t i) { return Cell{columns_[i].title, Tone::kPlain}; });
  for (const auto& row : rows_) print_row([&](std::size_t i) { return row[i]; });
}

}  // namespace unbroken::cli
