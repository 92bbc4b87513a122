/* Stops a process after each of its file operations below a folder, until it is told to go on.
 *
 * Loaded by LD_PRELOAD, so that it sees what C++ libraries write too. After each operation that
 * succeeded below `root`, one line goes to the descriptor `out`: its name, a tab and the path, for
 * a rename the new one. One byte read from `in` lets it go on. Operations are done one at a time,
 * so that between a line and its byte the folder stands still. What is read needs no stop.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static int out, in;
static volatile int active;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

/* The two ends of what a test does, called from Python. */
void crash_points_begin(const char *folder, int to, int from) {
    snprintf(root, sizeof root, "%s", folder);
    out = to;
    in = from;
    active = 1;
}

void crash_points_end(void) { active = 0; }

/* The path that `fd` is open on; "" if it has none. */
static void path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[size > 0 ? size : 0] = 0;
}

static void resolve(int dir, const char *name, char *path) {
    if (name[0] == '/' || dir == AT_FDCWD) {
        snprintf(path, PATH_MAX, "%s", name);
    } else {
        path_of(dir, path);
        size_t used = strlen(path);
        snprintf(path + used, PATH_MAX - used, "/%s", name);
    }
}

static int watched(const char *path) {
    size_t size = strlen(root);
    return active && strncmp(path, root, size) == 0 && (path[size] == '/' || path[size] == 0);
}

static void stop(const char *name, const char *path) {
    char line[PATH_MAX + 64], go;
    int size = snprintf(line, sizeof line, "%s\t%s\n", name, path);
    if (syscall(SYS_write, out, line, size) != size || syscall(SYS_read, in, &go, 1) != 1)
        syscall(SYS_exit_group, 99); /* nobody listens any more */
}

/* Does CALL of the real function; a stop follows if it succeeded below the root. */
#define WATCH(TYPE, NAME, PATH, DECLARED, CALL)                                                 \
    TYPE(*real) DECLARED = (TYPE(*) DECLARED)dlsym(RTLD_NEXT, NAME);                            \
    if (!watched(PATH)) return real CALL;                                                       \
    pthread_mutex_lock(&one_at_a_time);                                                         \
    TYPE result = real CALL;                                                                    \
    int error = errno;                                                                          \
    if (result >= 0) stop(NAME, PATH);                                                          \
    pthread_mutex_unlock(&one_at_a_time);                                                       \
    errno = error;                                                                              \
    return result;

/* Opening a file is an operation if it may make or empty one. */
#define OPEN(NAME)                                                                              \
    int NAME(const char *name, int flags, ...) {                                                \
        va_list more;                                                                           \
        va_start(more, flags);                                                                  \
        mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;                               \
        va_end(more);                                                                           \
        char path[PATH_MAX] = "";                                                               \
        if (flags & (O_CREAT | O_TRUNC)) resolve(AT_FDCWD, name, path);                         \
        WATCH(int, #NAME, path, (const char *, int, ...), (name, flags, mode))                  \
    }
#define OPENAT(NAME)                                                                            \
    int NAME(int dir, const char *name, int flags, ...) {                                       \
        va_list more;                                                                           \
        va_start(more, flags);                                                                  \
        mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;                               \
        va_end(more);                                                                           \
        char path[PATH_MAX] = "";                                                               \
        if (flags & (O_CREAT | O_TRUNC)) resolve(dir, name, path);                              \
        WATCH(int, #NAME, path, (int, const char *, int, ...), (dir, name, flags, mode))        \
    }
#define ON_FD(TYPE, NAME, DECLARED, CALL)                                                       \
    TYPE NAME DECLARED {                                                                        \
        char path[PATH_MAX];                                                                    \
        path_of(fd, path);                                                                      \
        WATCH(TYPE, #NAME, path, DECLARED, CALL)                                                \
    }
#define ON_PATH(NAME, DIR, PATH, DECLARED, CALL)                                                \
    int NAME DECLARED {                                                                         \
        char path[PATH_MAX];                                                                    \
        resolve(DIR, PATH, path);                                                               \
        WATCH(int, #NAME, path, DECLARED, CALL)                                                 \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
ON_FD(ssize_t, write, (int fd, const void *from, size_t size), (fd, from, size))
ON_FD(ssize_t, pwrite, (int fd, const void *from, size_t size, off_t at), (fd, from, size, at))
ON_FD(ssize_t, pwrite64, (int fd, const void *from, size_t size, off64_t at), (fd, from, size, at))
ON_FD(ssize_t, writev, (int fd, const struct iovec *from, int n), (fd, from, n))
ON_FD(ssize_t, pwritev, (int fd, const struct iovec *from, int n, off_t at), (fd, from, n, at))
ON_FD(ssize_t, pwritev64, (int fd, const struct iovec *from, int n, off64_t at), (fd, from, n, at))
ON_FD(int, fsync, (int fd), (fd))
ON_FD(int, fdatasync, (int fd), (fd))
ON_FD(int, ftruncate, (int fd, off_t size), (fd, size))
ON_FD(int, ftruncate64, (int fd, off64_t size), (fd, size))
ON_PATH(truncate, AT_FDCWD, name, (const char *name, off_t size), (name, size))
ON_PATH(creat, AT_FDCWD, name, (const char *name, mode_t mode), (name, mode))
ON_PATH(creat64, AT_FDCWD, name, (const char *name, mode_t mode), (name, mode))
ON_PATH(unlink, AT_FDCWD, name, (const char *name), (name))
ON_PATH(unlinkat, dir, name, (int dir, const char *name, int flags), (dir, name, flags))
ON_PATH(mkdir, AT_FDCWD, name, (const char *name, mode_t mode), (name, mode))
ON_PATH(mkdirat, dir, name, (int dir, const char *name, mode_t mode), (dir, name, mode))
ON_PATH(rmdir, AT_FDCWD, name, (const char *name), (name))
ON_PATH(rename, AT_FDCWD, name, (const char *old, const char *name), (old, name))
ON_PATH(renameat, dir, name, (int from, const char *old, int dir, const char *name),
        (from, old, dir, name))
ON_PATH(renameat2, dir, name,
        (int from, const char *old, int dir, const char *name, unsigned int flags),
        (from, old, dir, name, flags))
ON_PATH(link, AT_FDCWD, name, (const char *old, const char *name), (old, name))
ON_PATH(linkat, dir, name, (int from, const char *old, int dir, const char *name, int flags),
        (from, old, dir, name, flags))
