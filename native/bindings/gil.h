// Python's global lock. The interpreter ends a thread that asks for the lock after it has begun to shut down, and it does so by
// unwinding the thread's stack (pthread_exit), which aborts the process at the first destructor that must not throw. A thread that
// comes back to a closing interpreter sleeps here instead until the process is gone, as Python 3.14 lets it.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

// Runs what may need the lock.
template <class Call>
auto or_sleep(const Call& call) {
#if defined(__GLIBCXX__)
    try {
        return call();
    } catch (const abi::__forced_unwind&) {
        for (;;) pause();
    }
#else
    return call();
#endif
}

// Others may have the lock while this lives.
class Unlocked {
public:
    Unlocked() : thread_(PyEval_SaveThread()) {}
    ~Unlocked() {
        or_sleep([this] { PyEval_RestoreThread(thread_); });
    }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

private:
    PyThreadState* thread_;
};

// This thread has the lock while this lives.
class Locked {
public:
    Locked() : state_(or_sleep([] { return PyGILState_Ensure(); })) {}
    ~Locked() { PyGILState_Release(state_); }
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;

private:
    PyGILState_STATE state_;
};
