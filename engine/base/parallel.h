// Runs independent pieces of work on a few threads that live as long as the call.
#pragma once

#include <cstddef>
#include <functional>

#include "base/error.h"

namespace unbroken {

// Calls work(i) for every i in [0, count), on up to `threads` threads including the caller's. After the first error no
// new piece is started; that error is returned once all running ones have ended. Pieces are taken in rising order.
Status parallel_for(std::size_t count, int threads, const std::function<Status(std::size_t)>& work);

}  // namespace unbroken
