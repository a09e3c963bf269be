/* Preloaded: lets the n-th operation on files under a folder fail with an error number of choice, as a disk would.

   refuse(folder, n, error) arms it, n counted from 0; error 0 only counts. operations() says how many there were since;
   refused() names the one that failed. What a full disk allows (reading, deleting) is not counted for ENOSPC. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define DESCRIPTORS 4096
static char folder[4096], name[4352], of_descriptor[DESCRIPTORS][256];
static atomic_int count, wanted, error_number, armed;

void refuse(const char *where, int n, int error) {
    strncpy(folder, where, sizeof folder - 1);
    atomic_store(&count, 0);
    name[0] = 0;
    wanted = n;
    error_number = error;
    armed = 1;
}
void relent(void) { armed = 0; }
int operations(void) { return count; }
const char *refused(void) { return name; }

static int under(const char *path) { return armed && path && !strncmp(path, folder, strlen(folder)); }
static const char *of(int descriptor) { return armed && descriptor >= 0 && descriptor < DESCRIPTORS && of_descriptor[descriptor][0] ? of_descriptor[descriptor] : 0; }

static int fails(const char *what, const char *path, int takes_room) {
    if (error_number == ENOSPC && !takes_room) return 0;
    if (atomic_fetch_add(&count, 1) != wanted || !error_number) return 0;
    snprintf(name, sizeof name, "%s %s", what, path);
    errno = error_number;
    return 1;
}

#define REAL(type, function, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #function)
#define TELL(descriptor, path) do { if (descriptor >= 0 && descriptor < DESCRIPTORS) { \
    of_descriptor[descriptor][0] = 0; \
    if (under(path)) strncpy(of_descriptor[descriptor], path + strlen(folder), 255); } } while (0)
#define OPEN(function) int function(const char *path, int flags, ...) { \
    REAL(int, function, const char *, int, ...); \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    if (under(path) && fails("open", path, flags & O_CREAT)) return -1; \
    int descriptor = real(path, flags, mode); TELL(descriptor, path); return descriptor; }
#define OPENAT(function) int function(int at, const char *path, int flags, ...) { \
    REAL(int, function, int, const char *, int, ...); \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    if (under(path) && fails("open", path, flags & O_CREAT)) return -1; \
    int descriptor = real(at, path, flags, mode); TELL(descriptor, path); return descriptor; }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

#define ON_DESCRIPTOR(type, function, what, room, arguments, values) type function arguments { \
    static type (*real) arguments; if (!real) real = dlsym(RTLD_NEXT, #function); \
    const char *path = of(descriptor); \
    if (path && fails(what, path, room)) return -1; \
    return real values; }
ON_DESCRIPTOR(ssize_t, write, "write", 1, (int descriptor, const void *data, size_t size), (descriptor, data, size))
ON_DESCRIPTOR(ssize_t, writev, "write", 1, (int descriptor, const struct iovec *data, int size), (descriptor, data, size))
ON_DESCRIPTOR(ssize_t, pwrite64, "write", 1, (int descriptor, const void *data, size_t size, off64_t at), (descriptor, data, size, at))
ON_DESCRIPTOR(ssize_t, read, "read", 0, (int descriptor, void *data, size_t size), (descriptor, data, size))
ON_DESCRIPTOR(ssize_t, pread64, "read", 0, (int descriptor, void *data, size_t size, off64_t at), (descriptor, data, size, at))
ON_DESCRIPTOR(int, fsync, "sync", 1, (int descriptor), (descriptor))
ON_DESCRIPTOR(int, fdatasync, "sync", 1, (int descriptor), (descriptor))
ON_DESCRIPTOR(int, ftruncate64, "cut", 0, (int descriptor, off64_t size), (descriptor, size))

#define ON_PATH(function, what, room, arguments, values) int function arguments { \
    static int (*real) arguments; if (!real) real = dlsym(RTLD_NEXT, #function); \
    if (under(path) && fails(what, path, room)) return -1; \
    return real values; }
ON_PATH(mkdir, "make folder", 1, (const char *path, mode_t mode), (path, mode))
ON_PATH(unlink, "delete", 0, (const char *path), (path))
ON_PATH(rmdir, "delete folder", 0, (const char *path), (path))
ON_PATH(rename, "rename", 1, (const char *path, const char *to), (path, to))
ON_PATH(link, "link", 1, (const char *path, const char *to), (path, to))
