// Work on the rows of an array, in tasks of some rows.
#pragma once

#include "parallel.h"

namespace raggedmoe {

// Calls body(row) for every row, of which each moves that many bytes, on all threads of the pool.
template <class Pool, class Body>
void for_row_tasks(Pool& pool, int64_t num_rows, int64_t bytes_of_row, Body body) {
  const int64_t rows = std::max<int64_t>(1, (int64_t{1} << 19) / std::max<int64_t>(1, bytes_of_row));
  parallel_for(pool, (num_rows + rows - 1) / rows, [&](int64_t task) {
    for (int64_t row = task * rows; row < std::min((task + 1) * rows, num_rows); ++row) body(row);
  });
}

}  // namespace raggedmoe
