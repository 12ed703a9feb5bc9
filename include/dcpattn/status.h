/* SPDX-License-Identifier: Apache-2.0 */
/* Status codes, last error, version. */
#ifndef DCPATTN_STATUS_H
#define DCPATTN_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define DCP_API __attribute__((visibility("default")))
#else
#define DCP_API
#endif

#define DCP_VERSION_MAJOR 0
#define DCP_VERSION_MINOR 1
#define DCP_VERSION_PATCH 0
#define DCP_VERSION "0.1.0"

/* One list makes the enum, the names and the texts. Values are fixed: they are part of the ABI. */
#define DCP_STATUS_LIST(X)                                                                         \
    X(OK, 0, "success")                                                                            \
    X(ERR_ARG, -1, "invalid argument")                                                             \
    X(ERR_NOMEM, -2, "out of memory")                                                              \
    X(ERR_FORMAT, -3, "malformed file")                                                            \
    X(ERR_SYS, -4, "system call failed")                                                           \
    X(ERR_PEER, -5, "a peer failed")                                                               \
    X(ERR_TIMEOUT, -6, "deadline passed")                                                          \
    X(ERR_MISMATCH, -7, "ranks disagree")                                                          \
    X(ERR_NOT_SUPPORTED, -8, "not supported")                                                      \
    X(ERR_NONFINITE, -9, "non-finite value")                                                       \
    X(ERR_POISONED, -10, "group is poisoned by an earlier failure")                                \
    X(ERR_BUSY, -11, "object is in use by another call")

typedef enum dcp_status {
#define X(name, value, text) DCP_##name = (value),
    DCP_STATUS_LIST(X)
#undef X
} dcp_status;

/** The short text of a code ("a peer failed").
 *  @param[in] st  any number; unknown codes have a text too
 *  @return never NULL
 *  Ownership: static storage.  Threads: any.  Collective: no. */
DCP_API const char *dcp_status_text(dcp_status st);

/** The full text of this thread's last failure: exact cause, names and values, file:line; "" if
 * none. What returns nothing, as dcp_group_abort, dcp_group_free and the destroy functions, leaves
 * it as it is.
 *  Ownership: thread-local, valid until the thread's next failing call.  Threads: any.
 *  Collective: no. */
DCP_API const char *dcp_last_error(void);

/** Version of the library at run time, to compare with DCP_VERSION at build time.
 *  Ownership: static storage.  Threads: any.  Collective: no. */
DCP_API const char *dcp_version(void);

#ifdef __cplusplus
}
#endif
#endif
