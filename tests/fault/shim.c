/*
 * Stand between a process and the C library, for files below one folder: count each file operation, and at the n-th one
 * die, stop, be interrupted or fail. SQLite's operations pass here as Python's do. Loaded with LD_PRELOAD (Linux only).
 *
 * Controlled by `tests/fault/trap.py`, which calls `trap_*` in the very process that is to suffer.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, CREATE, READ, WRITE, SYNC, RENAME, LINK, UNLINK, MKDIR, TRUNCATE, CHMOD, CLOSE, STAT, LOCK, LIST, N_KINDS };
enum { OFF, COUNT, KILL_BEFORE, KILL_WITHIN, STOP, INTERRUPT, FAIL, SHORT };

#define MAX_FILES 4096
#define MAX_NOTED 20000

static char root[4096];
static size_t root_length;
static int mode, error_number, sticky, record_to = -1;
static unsigned mask;
static long nth, seen;
static char kinds_seen[MAX_NOTED];
static char hit_path[4096];
static ino_t failed_sync, retried_sync;
static char *path_of[MAX_FILES];
static pthread_mutex_t recording = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static int ours(const char *path) {
    return mode != OFF && root_length && path && !strncmp(path, root, root_length) &&
           (path[root_length] == '/' || !path[root_length]);
}
static const char *known(int fd) { return mode != OFF && fd >= 0 && fd < MAX_FILES ? path_of[fd] : NULL; }
/* SQLite syncs the folder of its files too: the root, and tmp, where a repair makes a new index. We never sync tmp. */
static int is_index(const char *path) {
    return strstr(path, "index.sqlite3") || !strcmp(path, root) || !strcmp(path + root_length, "/tmp");
}

static ino_t inode(int fd) {
    struct stat64 status;
    return REAL(fstat64)(fd, &status) ? 0 : status.st_ino;
}

static void put(const void *bytes, size_t n) {
    while (n) {
        ssize_t done = REAL(write)(record_to, bytes, n);
        if (done <= 0) abort();
        bytes = (const char *)bytes + done;
        n -= done;
    }
}

struct record { uint32_t kind, length, other_length, n_views; uint64_t inode, offset, n_bytes; };

static void record(int kind, const char *path, const char *other, uint64_t ino, uint64_t offset,
                   const struct iovec *views, int n_views, uint64_t n_bytes) {
    if (record_to < 0) return;
    int saved = errno;
    struct record head = {kind, strlen(path), other ? strlen(other) : 0, 0, ino, offset, n_bytes};
    pthread_mutex_lock(&recording);
    put(&head, sizeof head);
    put(path, head.length);
    if (other) put(other, head.other_length);
    for (int i = 0; i < n_views && n_bytes; i++) {
        size_t n = views[i].iov_len < n_bytes ? views[i].iov_len : n_bytes;
        put(views[i].iov_base, n);
        n_bytes -= n;
    }
    pthread_mutex_unlock(&recording);
    errno = saved;
}

/* What to do at this operation: 0 go on, 1 fail, 2 do it (a write: half of it) and die, 3 write half. */
static int step(int kind, const char *path) {
    if (mode == OFF || !(mask >> kind & 1)) return 0;
    long number = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
    if (number <= MAX_NOTED) kinds_seen[number - 1] = 'A' + kind;
    if (mode == COUNT || (number != nth && !(sticky && number > nth))) return 0;
    if (number == nth) snprintf(hit_path, sizeof hit_path, "%s", path);
    switch (mode) {
        case KILL_BEFORE: kill(getpid(), SIGKILL); for (;;) pause();
        case KILL_WITHIN: return 2;
        case STOP: raise(SIGSTOP); return 0;
        case INTERRUPT: kill(getpid(), SIGINT); return 0;
        case FAIL: errno = error_number; return 1;
        case SHORT: return kind == WRITE ? 3 : 0;
    }
    return 0;
}
static void die_if(int what) {
    if (what == 2) { kill(getpid(), SIGKILL); for (;;) pause(); }
}

/* --- control */
void trap_root(const char *path) {
    snprintf(root, sizeof root, "%s", path);
    root_length = strlen(root);
}
void trap_arm(int new_mode, long number, unsigned new_mask, int new_errno, int new_sticky) {
    nth = number; mask = new_mask; error_number = new_errno; sticky = new_sticky;
    seen = 0; failed_sync = retried_sync = 0; hit_path[0] = 0;
    mode = new_mode;
}
void trap_rest(void) { mask = 0; }
void trap_record(int fd) { record_to = fd; }
void trap_mark(long number) { record(N_KINDS, "", NULL, number, 0, NULL, 0, 0); }
long trap_seen(void) { return seen; }
const char *trap_kinds(void) {
    kinds_seen[seen < MAX_NOTED ? seen : MAX_NOTED - 1] = 0;
    return kinds_seen;
}
const char *trap_hit(void) { return hit_path; }
int trap_retried(void) { return retried_sync != 0; }

/* --- opening */
static int opened(int fd, const char *path, int flags, int made, int what) {
    if (fd >= 0 && fd < MAX_FILES) {
        int saved = errno;
        free(path_of[fd]);
        path_of[fd] = strdup(path);
        if (made) record(CREATE, path, NULL, inode(fd), 0, NULL, 0, 0);
        else if (flags & O_TRUNC) record(TRUNCATE, path, NULL, inode(fd), 0, NULL, 0, 0);
        errno = saved;
    }
    die_if(what);
    return fd;
}
static int is_missing(const char *path) {
    struct stat64 status;
    int saved = errno, missing = REAL(lstat64)(path, &status) != 0;
    errno = saved;
    return missing;
}
#define OPENS(name)                                                                         \
    int name(const char *path, int flags, ...) {                                            \
        va_list more; va_start(more, flags); int file_mode = va_arg(more, int); va_end(more); \
        if (!ours(path)) return REAL(name)(path, flags, file_mode);                         \
        int what = step(flags & O_CREAT ? CREATE : OPEN, path);                             \
        if (what == 1) return -1;                                                           \
        int made = flags & O_CREAT && is_missing(path);                                     \
        return opened(REAL(name)(path, flags, file_mode), path, flags, made, what);         \
    }
OPENS(open)
OPENS(open64)
#define OPENS_2(name)                                                                       \
    int name(const char *path, int flags) {                                                 \
        int (*wanted)(const char *, int) = real(#name);                                     \
        if (!ours(path)) return wanted(path, flags);                                        \
        int what = step(OPEN, path);                                                        \
        return what == 1 ? -1 : opened(wanted(path, flags), path, flags, 0, what);          \
    }
OPENS_2(__open_2)
OPENS_2(__open64_2)

int close(int fd) {
    const char *path = known(fd);
    if (!path) {
        if (fd >= 0 && fd < MAX_FILES && path_of[fd]) { free(path_of[fd]); path_of[fd] = NULL; }
        return REAL(close)(fd);
    }
    int what = step(CLOSE, path), saved = errno;
    free(path_of[fd]);
    path_of[fd] = NULL;
    int done = REAL(close)(fd);
    die_if(what);
    if (what == 1) { errno = saved; return -1; } /* as Linux does: it is closed all the same */
    return done;
}

/* --- reading and writing */
#define READS(name, arguments, given)                        \
    ssize_t name arguments {                                 \
        ssize_t (*wanted) arguments = real(#name);           \
        const char *path = known(fd);                        \
        int what = path ? step(READ, path) : 0;              \
        if (what == 1) return -1;                            \
        ssize_t done = wanted given;                         \
        die_if(what);                                        \
        return done;                                         \
    }
READS(read, (int fd, void *to, size_t n), (fd, to, n))
READS(__read_chk, (int fd, void *to, size_t n, size_t room), (fd, to, n, room))
READS(pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
READS(pread, (int fd, void *to, size_t n, off_t at), (fd, to, n, at))
READS(preadv64, (int fd, const struct iovec *to, int n, off64_t at), (fd, to, n, at))
READS(preadv64v2, (int fd, const struct iovec *to, int n, off64_t at, int flags), (fd, to, n, at, flags))

static ssize_t wrote(int fd, const char *path, const struct iovec *views, int n_views, off64_t at, ssize_t done, int what) {
    if (done > 0) record(WRITE, path, NULL, inode(fd), at, views, n_views, done);
    die_if(what);
    return done;
}
ssize_t write(int fd, const void *from, size_t n) {
    const char *path = known(fd);
    int what = path ? step(WRITE, path) : 0;
    if (what == 1) return -1;
    if (!path) return REAL(write)(fd, from, n);
    off64_t at = lseek64(fd, 0, SEEK_CUR);
    struct iovec view = {(void *)from, n};
    return wrote(fd, path, &view, 1, at, REAL(write)(fd, from, what > 1 ? (n + 1) / 2 : n), what);
}
#define WRITES_AT(name, offset)                                                                               \
    ssize_t name(int fd, const void *from, size_t n, offset at) {                                             \
        const char *path = known(fd);                                                                         \
        int what = path ? step(WRITE, path) : 0;                                                              \
        if (what == 1) return -1;                                                                             \
        if (!path) return REAL(name)(fd, from, n, at);                                                        \
        struct iovec view = {(void *)from, n};                                                                \
        return wrote(fd, path, &view, 1, at, REAL(name)(fd, from, what > 1 ? (n + 1) / 2 : n, at), what);     \
    }
WRITES_AT(pwrite64, off64_t)
WRITES_AT(pwrite, off_t)
ssize_t writev(int fd, const struct iovec *views, int n) {
    const char *path = known(fd);
    int what = path ? step(WRITE, path) : 0;
    if (what == 1) return -1;
    if (!path) return REAL(writev)(fd, views, n);
    off64_t at = lseek64(fd, 0, SEEK_CUR);
    struct iovec half = {views[0].iov_base, (views[0].iov_len + 1) / 2};
    ssize_t done = what > 1 && n == 1 ? REAL(writev)(fd, &half, 1) : REAL(writev)(fd, views, what > 1 ? (n + 1) / 2 : n);
    return wrote(fd, path, views, n, at, done, what);
}
#define SYNCS(name)                                                                        \
    int name(int fd) {                                                                     \
        const char *path = known(fd);                                                      \
        if (!path) return REAL(name)(fd);                                                  \
        if (failed_sync && !is_index(path) && inode(fd) == failed_sync) retried_sync = 1;  \
        int what = step(SYNC, path);                                                       \
        if (what == 1) {                                                                   \
            int saved = errno;                                                             \
            if (!is_index(path)) failed_sync = inode(fd);                                  \
            errno = saved;                                                                 \
            return -1;                                                                     \
        }                                                                                  \
        int done = REAL(name)(fd);                                                         \
        if (!done) record(SYNC, path, NULL, inode(fd), 0, NULL, 0, 0);                     \
        die_if(what);                                                                      \
        return done;                                                                       \
    }
SYNCS(fsync)
SYNCS(fdatasync)
#define TRUNCATES(name, offset)                                                            \
    int name(int fd, offset size) {                                                        \
        const char *path = known(fd);                                                      \
        int what = path ? step(TRUNCATE, path) : 0;                                        \
        if (what == 1) return -1;                                                          \
        int done = REAL(name)(fd, size);                                                   \
        if (path && !done) record(TRUNCATE, path, NULL, inode(fd), size, NULL, 0, 0);      \
        die_if(what);                                                                      \
        return done;                                                                       \
    }
TRUNCATES(ftruncate, off_t)
TRUNCATES(ftruncate64, off64_t)

/* --- names */
#define ON_TWO(name, kind)                                                                 \
    int name(const char *from, const char *to) {                                           \
        int mine = ours(from), what = mine ? step(kind, from) : 0;                         \
        if (what == 1) return -1;                                                          \
        int done = REAL(name)(from, to);                                                   \
        if (mine && !done) record(kind, from, to, 0, 0, NULL, 0, 0);                       \
        die_if(what);                                                                      \
        return done;                                                                       \
    }
ON_TWO(rename, RENAME)
ON_TWO(link, LINK)
int unlink(const char *path) {
    int mine = ours(path), what = mine ? step(UNLINK, path) : 0;
    if (what == 1) return -1;
    int done = REAL(unlink)(path);
    if (mine && !done) record(UNLINK, path, NULL, 0, 0, NULL, 0, 0);
    die_if(what);
    return done;
}
int mkdir(const char *path, mode_t file_mode) {
    int mine = ours(path), what = mine ? step(MKDIR, path) : 0;
    if (what == 1) return -1;
    int done = REAL(mkdir)(path, file_mode);
    if (mine && !done) record(MKDIR, path, NULL, 0, 0, NULL, 0, 0);
    die_if(what);
    return done;
}
int fchmod(int fd, mode_t file_mode) {
    const char *path = known(fd);
    int what = path ? step(CHMOD, path) : 0;
    if (what == 1) return -1;
    int done = REAL(fchmod)(fd, file_mode);
    die_if(what);
    return done;
}
int chmod(const char *path, mode_t file_mode) {
    int what = ours(path) ? step(CHMOD, path) : 0;
    if (what == 1) return -1;
    int done = REAL(chmod)(path, file_mode);
    die_if(what);
    return done;
}

/* --- looking */
#define STATS(name, type)                                              \
    int name(const char *path, struct type *to) {                      \
        int what = ours(path) ? step(STAT, path) : 0;                  \
        if (what == 1) return -1;                                      \
        int done = REAL(name)(path, to);                               \
        die_if(what);                                                  \
        return done;                                                   \
    }
STATS(stat64, stat64)
STATS(lstat64, stat64)
int fstat64(int fd, struct stat64 *to) {
    const char *path = known(fd);
    int what = path ? step(STAT, path) : 0;
    if (what == 1) return -1;
    int done = REAL(fstat64)(fd, to);
    die_if(what);
    return done;
}
int access(const char *path, int how) {
    int what = ours(path) ? step(STAT, path) : 0;
    if (what == 1) return -1;
    int done = REAL(access)(path, how);
    die_if(what);
    return done;
}
#define FCNTLS(name)                                                                        \
    int name(int fd, int command, ...) {                                                    \
        va_list more; va_start(more, command); void *given = va_arg(more, void *); va_end(more); \
        const char *path = command == F_SETLK || command == F_SETLK64 ? known(fd) : NULL;   \
        int what = path ? step(LOCK, path) : 0;                                             \
        if (what == 1) return -1;                                                           \
        int done = ((int (*)(int, int, ...))real(#name))(fd, command, given);               \
        die_if(what);                                                                       \
        return done;                                                                        \
    }
FCNTLS(fcntl)
FCNTLS(fcntl64)
DIR *opendir(const char *path) {
    int what = ours(path) ? step(LIST, path) : 0;
    if (what == 1) return NULL;
    DIR *folder = REAL(opendir)(path);
    die_if(what);
    return folder;
}
