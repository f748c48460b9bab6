/* The functions that `backnorm verify library.so:symbol` calls; with `--operation forward`, a
   backnorm_forward.

   Arrays are dense, in C order. Statistics, parameters and their gradients have `channels` elements:
   float64 for a float64 x, otherwise float32. The channel axis is 1 or the last. The function
   returns 0, or another number for a case that it does not support. */
#ifndef BACKNORM_SUBJECT_H
#define BACKNORM_SUBJECT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum backnorm_dtype {
  BACKNORM_FLOAT64 = 0,
  BACKNORM_FLOAT32 = 1,
  BACKNORM_FLOAT16 = 2,
  BACKNORM_BFLOAT16 = 3
};

typedef int backnorm_backward(
    const void *x, const void *dy, const void *mean, const void *variance,
    const void *gamma_or_null, void *dx, void *dgamma, void *dbeta,
    const int64_t *shape, int rank, int channel_axis, double epsilon, int training,
    int dtype);

typedef int backnorm_forward(
    const void *x, const void *gamma_or_null, const void *beta_or_null,
    void *y, void *mean, void *variance,
    const int64_t *shape, int rank, int channel_axis, double epsilon, int dtype);

#ifdef __cplusplus
}
#endif
#endif
