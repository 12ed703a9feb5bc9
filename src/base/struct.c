/* SPDX-License-Identifier: Apache-2.0 */
#include "base/struct_priv.h"

#include <string.h>

/* A longer one is no struct of ours but a field that was never set. */
static const size_t most_bytes = 4096;

static size_t size_of(const void *theirs)
{
    size_t n;
    memcpy(&n, theirs, sizeof(n));
    return n;
}

static dcp_status check_size(const char *call, const char *init, size_t n, size_t least_bytes)
{
    if (n >= least_bytes && n <= most_bytes) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG, "%s: struct_size is %zu, must be %zu to %zu; start from %s", call,
                     n, least_bytes, most_bytes, init);
}

dcp_status dcp__struct_read(const char *call, const char *init, const void *theirs,
                            size_t least_bytes, void *mine, size_t mine_bytes)
{
    if (theirs == NULL) return dcp__fail(DCP_ERR_ARG, "%s: the struct of %s is NULL", call, init);
    const size_t n = size_of(theirs);
    DCP_TRY(check_size(call, init, n, least_bytes));
    for (size_t i = mine_bytes; i < n; i++) {
        if (((const unsigned char *)theirs)[i] == 0) continue;
        return dcp__fail(DCP_ERR_ARG,
                         "%s: byte %zu of the struct of %s is set; this library knows %zu bytes "
                         "(it is older than its caller)",
                         call, i, init, mine_bytes);
    }
    memset(mine, 0, mine_bytes);
    memcpy(mine, theirs, n < mine_bytes ? n : mine_bytes);
    memcpy(mine, &mine_bytes, sizeof(mine_bytes));
    return DCP_OK;
}

dcp_status dcp__struct_check_out(const char *call, const char *init, const void *theirs,
                                 size_t least_bytes)
{
    return theirs == NULL ? DCP_OK : check_size(call, init, size_of(theirs), least_bytes);
}

void dcp__struct_write(void *theirs, size_t least_bytes, const void *mine, size_t mine_bytes)
{
    if (theirs == NULL) return;
    const size_t n = size_of(theirs), head = sizeof(size_t);
    if (n < least_bytes || n > most_bytes) return;
    memset((char *)theirs + head, 0, n - head);
    memcpy((char *)theirs + head, (const char *)mine + head,
           (n < mine_bytes ? n : mine_bytes) - head);
}
