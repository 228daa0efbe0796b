// libstdc++'s archive takes random numbers from arc4random, which the C library has since 2.36: with this one the program
// runs beside 2.35, too. Part of the portable program alone.
#include <sys/random.h>

extern "C" unsigned arc4random() {
    unsigned out = 0;
    while (getrandom(&out, sizeof out, 0) != sizeof out) // interrupted by a signal before there was any
        continue;
    return out;
}
