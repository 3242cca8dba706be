// Threads that wait for work. They are never joined: at exit the process ends with them waiting.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

class row_threads {
public:
    // Calls work(i) for each i from 0 to n - 1, on this thread and others.
    void run(void (*each)(void * data, int i), void * data, int n, int n_threads) {
        std::lock_guard<std::mutex>  one(call);
        const int                    helpers = std::min(n, n_threads) - 1;
        std::unique_lock<std::mutex> lock(mutex);
        for (; n_helpers < helpers; n_helpers++) {
            std::thread([this, index = n_helpers] { work(index); }).detach();
        }
        todo  = each;
        of    = data;
        count = n;
        next  = 0;
        busy = wanted = helpers;
        generation++;
        lock.unlock();
        begin.notify_all();
        drain();
        lock.lock();
        done.wait(lock, [this] { return busy == 0; });
    }

private:
    std::mutex              call, mutex;
    std::condition_variable begin, done;
    void (*todo)(void *, int) = nullptr;
    void *           of       = nullptr;
    int              count    = 0;
    std::atomic<int> next{ 0 };
    int              n_helpers = 0, busy = 0, wanted = 0;
    uint64_t         generation = 0;

    void drain() {
        for (int i; (i = next++) < count;) { todo(of, i); }
    }

    void work(int index) {
        uint64_t                     seen = 0;
        std::unique_lock<std::mutex> lock(mutex);
        while (true) {
            begin.wait(lock, [&] { return generation != seen; });
            seen = generation;
            if (index >= wanted) { continue; }
            lock.unlock();
            drain();
            lock.lock();
            if (--busy == 0) { done.notify_one(); }
        }
    }
};
