// The C face of sluice: register the backend, set its options, read its statistics.
//
// As a plugin nothing of this is needed: GGML_BACKEND_PATH=.../libggml-sluice.so makes any llama.cpp tool load it, and
// the options come from the environment (SLUICE_BUDGET and so on). A program that links the library calls
// ggml_backend_register(ggml_backend_sluice_reg()) before it loads a model.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

GGML_BACKEND_API ggml_backend_reg_t ggml_backend_sluice_reg(void);

// Sets an option for the models that are loaded after the call. Names are those of the environment without their
// prefix, in lower case: "budget", "io", "direct", "policy", ... (docs/settings.md). Returns false and writes one line
// into error when the name is unknown or the value does not fit.
GGML_BACKEND_API bool ggml_backend_sluice_set_option(const char * name, const char * value, char * error, size_t error_size);

// Writes the statistics of all streamed models as JSON (the keys of `sluice run --stats`), cut to size with a final
// NUL. Returns the length that the whole text has.
GGML_BACKEND_API size_t ggml_backend_sluice_get_stats(char * json, size_t size);

#ifdef __cplusplus
}
#endif
