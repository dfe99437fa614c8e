// The hash of the sources that the library was built from, and for which platform: tells a stale
// build in a checkout.
#include "operators/ort_api.h"

#ifndef STREAMSPEC_SOURCES
#define STREAMSPEC_SOURCES "unknown"
#endif

STREAMSPEC_EXPORT const char* streamspec_sources() {
    return "streamspec sources " STREAMSPEC_SOURCES;
}
