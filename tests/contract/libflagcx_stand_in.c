/* A stand-in for libflagcx: the functions that verl_fl/weight_sync/flagcx.py calls, on host memory, between processes of
 * one machine. Build with cc -shared -fPIC -pthread; -DFLAGCX_API=12 gives the calls of FlagCX up to 0.12.
 *
 * Like the real one: work is put on a stream and done later, in the order of the calls, by a thread of the communicator;
 * what stands in one group runs at once; ranks of several vendors can't be aborted; CommInitRank spoils its id.
 * Unlike it: a peer that dies, or sends another size than is waited for, is an error of streamSynchronize.
 *
 * Environment, read at each call:
 *   FLAGCX_STAND_IN_VENDOR=NAME          this rank's vendor
 *   FLAGCX_STAND_IN_FAIL=CALL:N[@RANK]   the N-th call of that name returns flagcxSystemError
 *   FLAGCX_STAND_IN_HANG=CALL:N[@RANK]   the N-th call of that name stays, until an abort between ranks of one vendor
 *   FLAGCX_STAND_IN_FLIP=flagcxRecv:N    what the N-th receive (or flagcxBroadcast) stores has one bit flipped
 *   FLAGCX_STAND_IN_TIMEOUT_S=S          how long CommInitRank waits for the other ranks (20)
 * Calls are counted from when the variable took its value. @RANK: only that rank of a communicator counts. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifndef FLAGCX_API
#define FLAGCX_API 13
#endif
#define ID_BYTES 256
#define ID_MARK "flagcx-stand-in-"
#define QUEUE_MARK 0x51554555u

typedef enum {
  OK = 0,
  SYSTEM_ERROR = 2,
  INTERNAL_ERROR = 3,
  INVALID_ARGUMENT = 4,
  INVALID_USAGE = 5,
  REMOTE_ERROR = 6,
  NOT_SUPPORTED = 9
} result;

/* What a raw stream handle of the stand-in's device points to. */
struct queue {
  uint32_t mark;
  int pending;
  result failed;
};
struct flagcxStream {
  struct queue *base;
};

struct header {
  uint32_t kind;
  uint64_t size;
};
enum { SEND_RECV = 1, BROADCAST = 2 };

struct op {
  int sends, peer, flip;
  char *address;
  size_t done; /* of the header and what follows it */
  struct header header, theirs;
  struct queue *queue;
  struct op *next;
};
struct batch {
  struct op *first, **end;
  struct batch *next;
};

struct flagcxComm {
  int rank, size, several_vendors;
  int *sockets;
  int aborted, given_up, leaving;
  result broken;
  struct batch *first, **end;
  pthread_t worker;
  char error[256];
};
typedef struct flagcxComm *comm_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that threads share below */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct queue default_queue = {QUEUE_MARK, 0, OK}; /* that of the raw handle 0 */
static char startup_error[256];

static __thread int depth;
static __thread comm_t grouped;
static __thread struct batch *group;

static result fail(comm_t comm, result code, const char *format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(comm ? comm->error : startup_error, sizeof startup_error, format, values);
  va_end(values);
  return code;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

/* ---- faults ---- */

enum { FAIL, HANG, FLIP, NUM_FAULTS };

static int due(int fault, const char *call, comm_t comm) {
  static const char *names[] = {"FLAGCX_STAND_IN_FAIL", "FLAGCX_STAND_IN_HANG", "FLAGCX_STAND_IN_FLIP"};
  static char seen[NUM_FAULTS][128];
  static int counts[NUM_FAULTS];
  const char *text = getenv(names[fault]);
  char name[64];
  int n = 0, rank = -1, is_due = 0;
  pthread_mutex_lock(&lock);
  if (strncmp(seen[fault], text ? text : "", sizeof seen[fault])) {
    snprintf(seen[fault], sizeof seen[fault], "%s", text ? text : "");
    counts[fault] = 0;
  }
  if (text && sscanf(text, "%63[^:]:%d@%d", name, &n, &rank) >= 2 && !strcmp(name, call) &&
      (rank < 0 || (comm && comm->rank == rank)))
    is_due = ++counts[fault] == n;
  pthread_mutex_unlock(&lock);
  return is_due;
}

static result fault(const char *call, comm_t comm) {
  if (due(FAIL, call, comm)) return fail(comm, SYSTEM_ERROR, "the stand-in was told to fail this %s", call);
  if (due(HANG, call, comm)) {
    while (!comm || !__atomic_load_n(&comm->aborted, __ATOMIC_ACQUIRE)) usleep(5000);
    return fail(comm, INTERNAL_ERROR, "%s was aborted", call);
  }
  return OK;
}

/* ---- the thread of a communicator ---- */

/* Moves what moves now: OK as long as nothing is wrong, whether or not the op is done. */
static result advance(comm_t comm, struct op *op) {
  size_t total = sizeof op->header + op->header.size;
  while (op->done < total) {
    int in_header = op->done < sizeof op->header;
    char *from = in_header ? (char *)(op->sends ? &op->header : &op->theirs) + op->done
                           : op->address + (op->done - sizeof op->header);
    size_t want = (in_header ? sizeof op->header : total) - op->done;
    int socket = comm->sockets[op->peer];
    ssize_t moved = op->sends ? send(socket, from, want, MSG_DONTWAIT | MSG_NOSIGNAL)
                              : recv(socket, from, want, MSG_DONTWAIT);
    if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return OK;
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return fail(comm, REMOTE_ERROR, "rank %d has gone", op->peer);
    op->done += moved;
    if (!op->sends && op->done == sizeof op->header &&
        (op->theirs.kind != op->header.kind || op->theirs.size != op->header.size))
      return fail(comm, INVALID_USAGE, "rank %d sent %llu bytes of kind %u, rank %d waits for %llu of kind %u", op->peer,
                  (unsigned long long)op->theirs.size, op->theirs.kind, comm->rank,
                  (unsigned long long)op->header.size, op->header.kind);
  }
  if (op->flip && op->header.size) op->address[op->header.size / 2] ^= 1;
  return OK;
}

static int finished(struct op *op) { return op->done == sizeof op->header + op->header.size; }

/* All ops at once, but those of one direction with one peer in their order. */
static result run(comm_t comm, struct batch *batch) {
  struct pollfd waits[comm->size];
  struct op *next[2][comm->size];
  for (;;) {
    int left = 0;
    if (__atomic_load_n(&comm->aborted, __ATOMIC_ACQUIRE)) return fail(comm, INTERNAL_ERROR, "aborted");
    memset(next, 0, sizeof next);
    for (int peer = 0; peer < comm->size; peer++) waits[peer] = (struct pollfd){comm->sockets[peer], 0, 0};
    for (struct op *op = batch->first; op; op = op->next) {
      if (finished(op)) continue;
      left = 1;
      if (next[op->sends][op->peer]) continue;
      next[op->sends][op->peer] = op;
      waits[op->peer].events |= op->sends ? POLLOUT : POLLIN;
    }
    if (!left) return OK;
    for (int peer = 0; peer < comm->size; peer++)
      if (!waits[peer].events) waits[peer].fd = -1; /* poll tells a hang-up even unasked */
    poll(waits, comm->size, 50);
    for (int peer = 0; peer < comm->size; peer++)
      for (int sends = 0; sends < 2; sends++) {
        struct op *op = next[sends][peer];
        if (!op || !(waits[peer].revents & ((sends ? POLLOUT : POLLIN) | POLLHUP | POLLERR))) continue;
        result code = advance(comm, op);
        if (code) return code;
      }
  }
}

static void drop(struct batch *batch, result code) {
  pthread_mutex_lock(&lock);
  for (struct op *op = batch->first, *next; op; op = next) {
    next = op->next;
    op->queue->pending--;
    if (code) op->queue->failed = code;
    free(op);
  }
  free(batch);
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

static void *work(void *argument) {
  comm_t comm = argument;
  pthread_mutex_lock(&lock);
  for (;;) {
    struct batch *batch = comm->first;
    if (!batch && comm->leaving) break;
    if (!batch) {
      pthread_cond_wait(&changed, &lock);
      continue;
    }
    if (!(comm->first = batch->next)) comm->end = &comm->first;
    if (!comm->broken) {
      pthread_mutex_unlock(&lock);
      result code = run(comm, batch);
      pthread_mutex_lock(&lock);
      comm->broken = code;
    }
    pthread_mutex_unlock(&lock);
    drop(batch, comm->broken);
    pthread_mutex_lock(&lock);
  }
  pthread_mutex_unlock(&lock);
  return NULL;
}

static struct batch *new_batch(void) {
  struct batch *batch = calloc(1, sizeof *batch);
  batch->end = &batch->first;
  return batch;
}

static void start(comm_t comm, struct batch *batch) {
  if (!batch->first) {
    drop(batch, OK);
    return;
  }
  pthread_mutex_lock(&lock);
  *comm->end = batch;
  comm->end = &batch->next;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

static void add(comm_t comm, struct batch *batch, int sends, uint32_t kind, const void *address, size_t size, int peer,
                struct queue *queue) {
  struct op *op = calloc(1, sizeof *op);
  op->sends = sends;
  op->peer = peer;
  op->address = (char *)address;
  op->header.kind = kind;
  op->header.size = size;
  op->queue = queue;
  op->flip = !sends && due(FLIP, kind == BROADCAST ? "flagcxBroadcast" : "flagcxRecv", comm);
  *batch->end = op;
  batch->end = &op->next;
  pthread_mutex_lock(&lock);
  queue->pending++;
  pthread_mutex_unlock(&lock);
}

static result prepare(comm_t comm, const void *address, size_t size, int type, int peer, struct flagcxStream *stream,
                      struct queue **queue) {
  if (!comm) return INTERNAL_ERROR;
  if (!stream) return fail(comm, INVALID_ARGUMENT, "no stream");
  *queue = stream->base ? stream->base : &default_queue;
  if ((*queue)->mark != QUEUE_MARK) return fail(comm, INVALID_ARGUMENT, "that is no stream of this device");
  if (peer < 0 || peer >= comm->size) return fail(comm, INVALID_ARGUMENT, "there is no rank %d", peer);
  if (type != 0 && type != 1) return fail(comm, INVALID_ARGUMENT, "the stand-in moves bytes only, not type %d", type);
  if (size && !address) return fail(comm, INVALID_ARGUMENT, "no address");
  if (comm->aborted) return fail(comm, INVALID_USAGE, "the communicator was aborted");
  if (depth && grouped && grouped != comm) return fail(comm, INVALID_USAGE, "a group of another communicator is open");
  return OK;
}

/* ---- joining ---- */

static socklen_t name_of(struct sockaddr_un *name, const char *id, int rank) {
  memset(name, 0, sizeof *name);
  name->sun_family = AF_UNIX; /* sun_path[0] stays 0: an abstract name, which goes with its socket */
  int length = snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "%s/%d", id, rank);
  return offsetof(struct sockaddr_un, sun_path) + 1 + length;
}

struct hello {
  int rank, size;
  char vendor[64];
};

static int whole(int socket, void *data, size_t size, int sends, double deadline) {
  for (size_t done = 0; done < size;) {
    struct pollfd wait = {socket, sends ? POLLOUT : POLLIN, 0};
    if (now() > deadline || poll(&wait, 1, 100) < 0) return 0;
    if (!wait.revents) continue;
    ssize_t moved = sends ? send(socket, (char *)data + done, size - done, MSG_NOSIGNAL)
                          : recv(socket, (char *)data + done, size - done, 0);
    if (moved <= 0) return 0;
    done += moved;
  }
  return 1;
}

static result meet(comm_t comm, int socket, struct hello *ours, double deadline) {
  struct hello theirs;
  if (!whole(socket, ours, sizeof *ours, 1, deadline) || !whole(socket, &theirs, sizeof theirs, 0, deadline))
    return fail(NULL, SYSTEM_ERROR, "a peer of rank %d does not answer", comm->rank);
  if (theirs.size != comm->size)
    return fail(NULL, INVALID_ARGUMENT, "rank %d expects %d ranks, rank %d %d", comm->rank, comm->size, theirs.rank,
                theirs.size);
  comm->sockets[theirs.rank] = socket;
  comm->several_vendors |= strcmp(theirs.vendor, ours->vendor) != 0;
  return OK;
}

static void vendor_of(char *vendor, size_t size) {
  const char *text = getenv("FLAGCX_STAND_IN_VENDOR");
  snprintf(vendor, size, "%s", text ? text : "STAND-IN");
}

static result join(comm_t comm, const char *id, int listener) {
  const char *limit = getenv("FLAGCX_STAND_IN_TIMEOUT_S");
  double deadline = now() + (limit ? atof(limit) : 20);
  struct hello ours = {comm->rank, comm->size, ""};
  struct sockaddr_un name;
  result code;
  vendor_of(ours.vendor, sizeof ours.vendor);
  socklen_t length = name_of(&name, id, comm->rank);
  if (bind(listener, (struct sockaddr *)&name, length) || listen(listener, comm->size))
    return fail(NULL, SYSTEM_ERROR, "rank %d: %s", comm->rank, strerror(errno));
  for (int peer = 0; peer < comm->rank; peer++) {
    int socket_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    length = name_of(&name, id, peer);
    while (connect(socket_, (struct sockaddr *)&name, length)) {
      if (now() > deadline) {
        close(socket_);
        return fail(NULL, SYSTEM_ERROR, "rank %d waited for rank %d in vain", comm->rank, peer);
      }
      usleep(2000);
    }
    if ((code = meet(comm, socket_, &ours, deadline))) return code;
  }
  for (int missing = comm->size - 1 - comm->rank; missing > 0; missing--) {
    struct pollfd wait = {listener, POLLIN, 0};
    if (poll(&wait, 1, (int)((deadline - now()) * 1000)) <= 0)
      return fail(NULL, SYSTEM_ERROR, "rank %d waited for %d higher ranks in vain", comm->rank, missing);
    if ((code = meet(comm, accept4(listener, NULL, NULL, SOCK_CLOEXEC), &ours, deadline))) return code;
  }
  /* Through rank 0 and back, so that all know whether any two vendors differ. */
  if (comm->size > 1 && comm->rank)
    return whole(comm->sockets[0], &comm->several_vendors, sizeof(int), 0, deadline)
               ? OK
               : fail(NULL, SYSTEM_ERROR, "rank 0 does not answer");
  for (int peer = 1; peer < comm->size; peer++) whole(comm->sockets[peer], &comm->several_vendors, sizeof(int), 1, deadline);
  return OK;
}

static void free_comm(comm_t comm) {
  for (int peer = 0; peer < comm->size; peer++)
    if (comm->sockets[peer] >= 0) close(comm->sockets[peer]);
  free(comm->sockets);
  free(comm);
}

result flagcxCommInitRank(comm_t *made, int size, char *id, int rank) {
  char name[96];
  result code = fault("flagcxCommInitRank", NULL);
  if (code) return code;
  if (!made || !id || size < 1 || rank < 0 || rank >= size) return fail(NULL, INVALID_ARGUMENT, "no such rank");
  if (strncmp(id, ID_MARK, strlen(ID_MARK))) return fail(NULL, INVALID_ARGUMENT, "no id of the stand-in");
  snprintf(name, sizeof name, "%.80s", id);
  memset(id, 0, ID_BYTES);
  comm_t comm = calloc(1, sizeof *comm);
  comm->rank = rank;
  comm->size = size;
  comm->end = &comm->first;
  comm->sockets = malloc(size * sizeof(int));
  for (int peer = 0; peer < size; peer++) comm->sockets[peer] = -1;
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  code = join(comm, name, listener);
  close(listener);
  if (!code && pthread_create(&comm->worker, NULL, work, comm)) code = fail(NULL, SYSTEM_ERROR, "no thread");
  if (code) {
    free_comm(comm);
    return code;
  }
  *made = comm;
  return OK;
}

result flagcxCommDestroy(comm_t comm) {
  result code = fault("flagcxCommDestroy", comm);
  if (!comm) return INTERNAL_ERROR;
  if (code) return code;
  if (comm->given_up) return fail(comm, INVALID_USAGE, "destroyed after an abort"); /* the real one crashes */
  pthread_mutex_lock(&lock);
  comm->leaving = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  pthread_join(comm->worker, NULL);
  free_comm(comm);
  return OK;
}

result flagcxCommAbort(comm_t comm) {
  result code = fault("flagcxCommAbort", comm);
  if (!comm) return INTERNAL_ERROR;
  if (code) return code;
  if (comm->given_up++) return fail(comm, INVALID_USAGE, "aborted twice");
  if (comm->several_vendors) return NOT_SUPPORTED;
  __atomic_store_n(&comm->aborted, 1, __ATOMIC_RELEASE); /* never freed: another thread may be in a call */
  for (int peer = 0; peer < comm->size; peer++)
    if (comm->sockets[peer] >= 0) shutdown(comm->sockets[peer], SHUT_RDWR);
  return OK;
}

/* ---- moving ---- */

static result move(const char *call, int sends, const void *address, size_t size, int type, int peer, comm_t comm,
                   struct flagcxStream *stream) {
  struct queue *queue;
  result code = fault(call, comm);
  if (!code) code = prepare(comm, address, size, type, peer, stream, &queue);
  if (code) return code;
  if (peer == comm->rank) return fail(comm, INVALID_ARGUMENT, "the stand-in sends nothing to its own rank");
  struct batch *batch = depth ? group : new_batch();
  add(comm, batch, sends, SEND_RECV, address, size, peer, queue);
  if (!depth) start(comm, batch);
  else grouped = comm;
  return OK;
}

result flagcxSend(const void *address, size_t size, int type, int peer, comm_t comm, struct flagcxStream *stream) {
  return move("flagcxSend", 1, address, size, type, peer, comm, stream);
}

result flagcxRecv(void *address, size_t size, int type, int peer, comm_t comm, struct flagcxStream *stream) {
  return move("flagcxRecv", 0, address, size, type, peer, comm, stream);
}

result flagcxBroadcast(const void *from, void *to, size_t size, int type, int root, comm_t comm,
                       struct flagcxStream *stream) {
  struct queue *queue;
  result code = fault("flagcxBroadcast", comm);
  if (!code) code = prepare(comm, to, size, type, root, stream, &queue);
  if (code) return code;
  struct batch *batch = depth ? group : new_batch();
  if (comm->rank != root) add(comm, batch, 0, BROADCAST, to, size, root, queue);
  for (int peer = 0; comm->rank == root && peer < comm->size; peer++)
    if (peer != root) add(comm, batch, 1, BROADCAST, from, size, peer, queue);
  if (!depth) start(comm, batch);
  else grouped = comm;
  return OK;
}

result flagcxGroupStart(comm_t comm) {
  result code = fault("flagcxGroupStart", comm);
  if (code) return code;
  if (depth++ == 0) {
    group = new_batch();
    grouped = NULL;
  }
  return OK;
}

result flagcxGroupEnd(comm_t comm) {
  if (!depth) return fail(comm, INVALID_USAGE, "no group is open");
  if (--depth) return OK;
  struct batch *batch = group;
  result code = fault("flagcxGroupEnd", comm);
  group = NULL;
  if (code) drop(batch, OK);
  else start(grouped, batch);
  return code;
}

/* ---- the device ---- */

static result stream_create(struct flagcxStream **stream) {
  result code = fault("streamCreate", NULL);
  if (code) return code;
  *stream = malloc(sizeof **stream);
  (*stream)->base = calloc(1, sizeof(struct queue));
  (*stream)->base->mark = QUEUE_MARK;
  return OK;
}

static result stream_destroy(struct flagcxStream *stream) {
  stream->base->mark = 0;
  free(stream->base);
  free(stream);
  return OK;
}

static result stream_synchronize(struct flagcxStream *stream) {
  result code = fault("streamSynchronize", NULL);
  if (code) return code;
  struct queue *queue = stream->base ? stream->base : &default_queue;
  if (queue->mark != QUEUE_MARK) return fail(NULL, INVALID_ARGUMENT, "that is no stream of this device");
  pthread_mutex_lock(&lock);
  while (queue->pending) pthread_cond_wait(&changed, &lock);
  code = queue->failed;
  queue->failed = OK;
  pthread_mutex_unlock(&lock);
  return code;
}

static result get_vendor(char *vendor) {
  vendor_of(vendor, 64);
  return OK;
}

/* A slot that is called by mistake must not look as if it had worked. */
static result unexpected(void) {
  fprintf(stderr, "the stand-in has no such device function\n");
  abort();
}

typedef result (*slot)();
struct flagcxDeviceHandle {
  slot synchronize, memcpy_, memset_, malloc_, free_, set_device, get_device, get_device_count;
  result (*get_vendor)(char *);
  slot host_pointer;
  result (*stream_create)(struct flagcxStream **);
  result (*stream_destroy)(struct flagcxStream *);
  slot stream_copy, stream_free;
  result (*stream_synchronize)(struct flagcxStream *);
  slot rest[12];
};

static struct flagcxDeviceHandle *new_handle(void) {
  struct flagcxDeviceHandle *handle = malloc(sizeof *handle);
  for (size_t i = 0; i < sizeof *handle / sizeof(slot); i++) ((slot *)handle)[i] = (slot)unexpected;
  handle->get_vendor = get_vendor;
  handle->stream_create = stream_create;
  handle->stream_destroy = stream_destroy;
  handle->stream_synchronize = stream_synchronize;
  return handle;
}

struct flagcxHandlerGroup {
  char *id;
  comm_t comm;
  struct flagcxDeviceHandle *device;
};

/* Since 0.13 it is still there, but deprecated; nobody should need it. */
result flagcxHandleInit(struct flagcxHandlerGroup **group_) {
  if (FLAGCX_API >= 13) return fail(NULL, NOT_SUPPORTED, "flagcxHandleInit is deprecated");
  *group_ = calloc(1, sizeof **group_);
  (*group_)->device = new_handle();
  return OK;
}

static void new_id(char *id) {
  static int count;
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  memset(id, 0, ID_BYTES);
  snprintf(id, ID_BYTES, ID_MARK "%d-%d-%lld%09ld", (int)getpid(), __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED),
           (long long)time.tv_sec, time.tv_nsec);
  id[ID_BYTES - 1] = 7; /* who cuts at the first 0 loses it */
}

#if FLAGCX_API >= 13
result flagcxDeviceHandleInit(struct flagcxDeviceHandle **handle) {
  *handle = new_handle();
  return OK;
}

result flagcxGetUniqueId(char *id) {
  result code = fault("flagcxGetUniqueId", NULL);
  if (!code) new_id(id);
  return code;
}

const char *flagcxGetErrorString(result code) {
  switch (code) {
    case OK: return "no error";
    case SYSTEM_ERROR: return "a system call failed";
    case INTERNAL_ERROR: return "internal error";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "invalid usage";
    case REMOTE_ERROR: return "a remote rank failed";
    default: return "unknown";
  }
}
#else
result flagcxGetUniqueId(char **id) {
  result code = fault("flagcxGetUniqueId", NULL);
  if (code) return code;
  *id = malloc(ID_BYTES);
  new_id(*id);
  return OK;
}

const char *flagcxGetErrorString(result code) {
  (void)code;
  return "Not implemented.";
}
#endif

const char *flagcxGetLastError(comm_t comm) { return comm ? comm->error : startup_error; }

result flagcxGetVersion(int *version) {
  *version = 10000; /* as the real one, whatever its release */
  return OK;
}

/* Its presence tells the layout of the device handle. */
result flagcxMemAlloc(void **address, size_t size) {
  *address = malloc(size);
  return *address ? OK : SYSTEM_ERROR;
}
