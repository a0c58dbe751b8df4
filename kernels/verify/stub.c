/* Stands in for the CUDA runtime below a kernel's launcher: keeps what it launches with. */
#include <stddef.h>
#include <string.h>

enum { MAX_PARAMETERS = 64, MAX_BYTES = 1024 };
typedef struct { unsigned x, y, z; } dim3_t;
typedef struct {
  dim3_t grid, block;
  size_t shared_bytes;
  void *stream, *attributes;
  unsigned attribute_count;
} launch_t;

launch_t blasst_launch;
unsigned char blasst_parameters[MAX_PARAMETERS][MAX_BYTES];
int blasst_launches;
static int sizes[MAX_PARAMETERS], count;
static char any_handle;

void blasst_begin(int n, const int *bytes) {
  count = n;
  memcpy(sizes, bytes, n * sizeof *bytes);
  blasst_launches = 0;
}

int _cudaLaunchKernelEx(const launch_t *launch, void *kernel, void **arguments) {
  blasst_launch = *launch;
  blasst_launches++;
  for (int i = 0; i < count; i++) memcpy(blasst_parameters[i], arguments[i], sizes[i]);
  return 0;
}

int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  *kernel = &any_handle;
  return 0;
}

int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d,
                         void *e, unsigned f) {
  *library = &any_handle;
  return 0;
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  *value = 0;
  return 0;
}

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  *value = 232448; /* the launcher asks only for the shared memory that a block may use */
  return 0;
}

int _cudaFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  return 0;
}
int _cudaGetDevice(int *device) {
  *device = 0;
  return 0;
}
int _cudaSetDevice(int device) { return 0; }
void CuteDSLRT_TVMFFISetRaisedCudaError(int error) {}
int cuda_dialect_init_library_once(void **state, int (*init)(void *), void *a, void *b) {
  return 0;
}
int cuda_dialect_unload_library_once(void *a, void *b) { return 0; }
