/* SPDX-License-Identifier: Apache-2.0 */
/* A group on streams of the caller's. What is sent is a header and a payload; a group and its
 * sub-groups share the streams and tell their messages apart by channel.
 *
 *   stream from rank 1   | rec ch 0 | msg ch 0 ........ | rec ch 2 | msg ch 0 ...
 *   posted for rank 1    msg ch 0, rec ch 0, rec ch 2      each takes the first of its kind
 *
 * Nothing is buffered here: a message that nobody has asked for yet stays in its stream, and what
 * is behind it waits with it. So ranks must order records and exchanges alike, as they do when they
 * run one program. A record is a message to each peer: one round, and it is known who is late.
 * Cost: no copy of ours; a header of 16 bytes per message. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "group/group_core_priv.h"

enum { HEADER_BYTES = 16, SKIP_BYTES = 4096, SLICE_MS = 20 };
enum kind {
    KIND_RECORD = 0x64637001,
    KIND_MESSAGE = 0x64637002,
    KIND_POISON = 0x64637003, /* with a note */
    KIND_LEFT = 0x64637004    /* has destroyed its handle; no payload */
};

struct header {
    uint32_t kind, channel;
    uint64_t n_bytes;
};
_Static_assert(sizeof(struct header) == HEADER_BYTES, "the header is what goes over the stream");

/* What a rank tells its peers when it poisons the group. */
struct note {
    int32_t code, line;
    char file[104], text[400];
};
_Static_assert(sizeof(struct note) % 8 == 0, "it follows a header without padding");

/* Frame of a record: the size travels with it, so that ranks that disagree find out. */
struct frame {
    uint64_t n_bytes;
    char data[DCP__RECORD_MAX];
};

/* One message, out or in. done_bytes counts the header of those that go out. */
struct flow {
    struct flow *next;
    struct header head;
    char *buf;
    uint64_t done_bytes;
    int *n_left; /* goes down by one when it is done */
    int peer;    /* in its group */
    bool is_queued;
};

/* Both directions between this rank and another one of the root group. */
struct link {
    struct flow *out, *in; /* oldest first */
    bool out_gone, in_gone, out_torn;
    /* the message that is arriving: a flow, a note, or something to skip */
    struct header head;
    size_t head_bytes;
    bool is_open, is_stalled;
    uint64_t payload_bytes;
    struct flow *into;
    struct note note;
};

struct custom_group;

struct custom_root {
    dcp_transport t;
    int n_refs, size;
    uint32_t next_channel;
    struct custom_group *groups; /* that are alive */
    struct link *links;          /* [size] */
    int *polled;                 /* [2 * size]: for t.wait */
    char skip[SKIP_BYTES];
};

struct custom_open {
    bool is_open;
    int n_left, n_flows;
    struct flow *flows; /* [2 * dcp__xfers_max] */
};

struct custom_group {
    dcp_group base; /* first */
    struct custom_root *root;
    struct custom_group *next;
    uint32_t channel;
    bool has_told;
    bool *left;           /* [size] */
    int *ranks;           /* [size]: in the root group */
    struct frame *frames; /* [size + 1]: of all, and the own one */
    struct custom_open open[DCP__ALL_SLOTS], record;
    struct flow *flows; /* memory of the above */
};

static struct custom_group *custom_of(dcp_group *g)
{
    return (struct custom_group *)g;
}

static struct link *link_to(struct custom_group *c, int rank)
{
    return &c->root->links[c->ranks[rank]];
}

static void append(struct flow **list, struct flow *f)
{
    while (*list != NULL) list = &(*list)->next;
    f->next = NULL;
    f->is_queued = true;
    *list = f;
}

static void take_out(struct flow **list, struct flow *f)
{
    while (*list != NULL && *list != f) list = &(*list)->next;
    if (*list == f) *list = f->next;
    f->is_queued = false;
}

/* --- moving --- */

/* DCP_OK with what could be moved; what is gone is noted and fails those that need it. */
static dcp_status push(struct custom_group *c, struct link *l, int root_rank, bool *moved)
{
    const dcp_transport *const t = &c->root->t;
    while (l->out != NULL && !l->out_gone && !l->out_torn) {
        struct flow *const f = l->out;
        const bool in_head = f->done_bytes < HEADER_BYTES;
        const char *const from = in_head ? (const char *)&f->head + f->done_bytes
                                         : f->buf + (f->done_bytes - HEADER_BYTES);
        const uint64_t end = in_head ? HEADER_BYTES : HEADER_BYTES + f->head.n_bytes;
        size_t n = 0;
        if (end > f->done_bytes) {
            const dcp_status st = t->send(t->ctx, root_rank, from, end - f->done_bytes, &n);
            if (st == DCP_ERR_PEER) {
                l->out_gone = true;
                return DCP_OK;
            }
            if (st != DCP_OK) {
                return dcp__group_poison(&c->base, st, "rank %d: sending to rank %d failed: %s",
                                         c->base.rank, f->peer, dcp_status_text(st));
            }
            if (n == 0) return DCP_OK;
        }
        *moved = true;
        f->done_bytes += n;
        if (f->done_bytes < HEADER_BYTES + f->head.n_bytes) continue;
        take_out(&l->out, f);
        (*f->n_left)--;
    }
    return DCP_OK;
}

static struct custom_group *group_of(struct custom_root *root, uint32_t channel)
{
    struct custom_group *c = root->groups;
    while (c != NULL && c->channel != channel) c = c->next;
    return c;
}

/* Poison another handle as if it had found the note itself. */
static void take_note(struct custom_group *c, struct link *l)
{
    l->note.file[sizeof(l->note.file) - 1] = l->note.text[sizeof(l->note.text) - 1] = '\0';
    c->has_told = true; /* who told us tells the others */
    (void)dcp__group_poison_at(&c->base, (dcp_status)l->note.code, l->note.file, (int)l->note.line,
                               "%s", l->note.text);
    c->base.cause_seen = false;
}

/* A header is complete: where does its payload go? False: nobody wants it yet. */
static bool open_message(struct custom_root *root, struct link *l)
{
    struct custom_group *const c = group_of(root, l->head.channel);
    l->into = NULL;
    l->payload_bytes = 0;
    if (l->head.kind == KIND_POISON || l->head.kind == KIND_LEFT) return true;
    if (c == NULL) return l->head.channel < root->next_channel; /* over: skip; to come: wait */
    if (dcp__group_is_poisoned(&c->base)) return true;
    struct flow *f = l->in;
    while (f != NULL && (f->head.channel != l->head.channel || f->head.kind != l->head.kind)) {
        f = f->next;
    }
    if (f == NULL) return false;
    if (f->head.n_bytes != l->head.n_bytes) {
        (void)dcp__group_poison(&c->base, DCP_ERR_MISMATCH,
                                "exchange: rank %d sends %llu bytes, rank %d expects %llu", f->peer,
                                (unsigned long long)l->head.n_bytes, c->base.rank,
                                (unsigned long long)f->head.n_bytes);
        c->base.cause_seen = false;
        return true; /* and skip it */
    }
    l->into = f;
    return true;
}

static void close_message(struct custom_root *root, struct link *l)
{
    struct custom_group *const c = group_of(root, l->head.channel);
    if (l->into != NULL) {
        take_out(&l->in, l->into);
        (*l->into->n_left)--;
    } else if (l->head.kind == KIND_POISON && c != NULL && !dcp__group_is_poisoned(&c->base)) {
        take_note(c, l);
    } else if (l->head.kind == KIND_LEFT && c != NULL) {
        for (int r = 0; r < c->base.size; r++) {
            if (link_to(c, r) == l) c->left[r] = true;
        }
    }
    l->into = NULL;
    l->is_open = false;
    l->head_bytes = 0;
}

static dcp_status pull(struct custom_group *c, struct link *l, int root_rank, bool *moved)
{
    struct custom_root *const root = c->root;
    while (!l->in_gone) {
        if (l->head_bytes == HEADER_BYTES && !l->is_open) {
            l->is_open = open_message(root, l);
            l->is_stalled = !l->is_open;
            if (l->is_stalled) return DCP_OK;
        }
        char *to = (char *)&l->head + l->head_bytes;
        size_t want = HEADER_BYTES - l->head_bytes;
        if (l->is_open) {
            const uint64_t left = l->head.n_bytes - l->payload_bytes;
            if (left == 0) {
                close_message(root, l);
                *moved = true;
                continue;
            }
            to = l->into != NULL               ? l->into->buf + l->payload_bytes
                 : l->head.kind == KIND_POISON ? (char *)&l->note + l->payload_bytes
                                               : root->skip;
            want = l->into == NULL && l->head.kind != KIND_POISON && left > SKIP_BYTES
                       ? SKIP_BYTES
                       : (size_t)left;
        }
        size_t n = 0;
        const dcp_status st = root->t.recv(root->t.ctx, root_rank, to, want, &n);
        if (st == DCP_ERR_PEER) {
            l->in_gone = true;
            return DCP_OK;
        }
        if (st != DCP_OK) {
            return dcp__group_poison(&c->base, st, "rank %d: receiving failed: %s", c->base.rank,
                                     dcp_status_text(st));
        }
        if (n == 0) return DCP_OK;
        *moved = true;
        if (l->is_open) {
            l->payload_bytes += n;
            continue;
        }
        l->head_bytes += n;
        const struct header *const h = &l->head;
        if (l->head_bytes == HEADER_BYTES && h->kind != KIND_RECORD && h->kind != KIND_MESSAGE &&
            (h->kind != KIND_POISON || h->n_bytes != sizeof(l->note)) &&
            (h->kind != KIND_LEFT || h->n_bytes != 0)) {
            l->in_gone = true;
            return dcp__group_poison(&c->base, DCP_ERR_FORMAT,
                                     "rank %d: the stream of rank %d (in the first group) holds "
                                     "%08x where a message should begin",
                                     c->base.rank, root_rank, h->kind);
        }
    }
    return DCP_OK;
}

static dcp_status move_all(struct custom_group *c, bool *moved_out)
{
    *moved_out = false;
    for (int r = 0; r < c->base.size; r++) {
        if (r == c->base.rank) continue;
        DCP_TRY(push(c, link_to(c, r), c->ranks[r], moved_out));
        DCP_TRY(pull(c, link_to(c, r), c->ranks[r], moved_out));
    }
    return DCP_OK;
}

/* --- waiting --- */

/* Is f unfinished? Flows that go out wait only if nothing is to come in from their peer. */
static bool is_awaited(const struct custom_open *o, int rank, bool *goes_out)
{
    bool out = false;
    for (int i = 0; i < o->n_flows; i++) {
        const struct flow *const f = &o->flows[i];
        if (!f->is_queued || f->peer != rank) continue;
        if (f->done_bytes == UINT64_MAX) { /* one that comes in */
            *goes_out = false;
            return true;
        }
        out = true;
    }
    *goes_out = true;
    return out;
}

static dcp_status check_gone(struct custom_group *c, const struct custom_open *o)
{
    for (int r = 0; r < c->base.size; r++) {
        bool goes_out;
        if (r == c->base.rank || !is_awaited(o, r, &goes_out)) continue;
        const struct link *const l = link_to(c, r);
        if (goes_out && l->out_torn) {
            return dcp__group_poison(&c->base, DCP_ERR_PEER,
                                     "the stream from rank %d to rank %d was cut in the middle of "
                                     "a message by a failure of another group",
                                     c->base.rank, r);
        }
        if (goes_out ? !l->out_gone : !l->in_gone && !c->left[r]) continue;
        return dcp__group_poison(
            &c->base, DCP_ERR_PEER, "rank %d %s while rank %d waited for it in %s", r,
            c->left[r] ? "has left the group" : "is gone (its stream is closed)", c->base.rank,
            dcp__call_name((uint32_t)c->base.call));
    }
    return DCP_OK;
}

static dcp_status poison_late(struct custom_group *c, const struct custom_open *o)
{
    const double deadline_s = (double)c->base.deadline_ns * 1e-9;
    char late[320] = "";
    size_t used = 0;
    /* First those from whom nothing came; if there are none, those that take nothing. */
    for (int pass = 0; pass < 2 && used == 0; pass++) {
        for (int r = 0; r < c->base.size && used < sizeof(late) - 24; r++) {
            bool goes_out;
            if (!is_awaited(o, r, &goes_out) || goes_out != (pass == 1)) continue;
            used += (size_t)snprintf(late + used, sizeof(late) - used, "%srank %d",
                                     used > 0 ? ", " : "", r);
        }
    }
    return dcp__group_poison(&c->base, DCP_ERR_TIMEOUT,
                             "rank %d waited %.1f %s in %s; did not "
                             "arrive: %s",
                             c->base.rank, dcp__wait_amount(deadline_s), dcp__wait_unit(deadline_s),
                             dcp__call_name((uint32_t)c->base.call), late);
}

static void sleep_for_streams(struct custom_group *c)
{
    struct custom_root *const root = c->root;
    if (root->t.wait == NULL) {
        const struct timespec ts = {.tv_sec = 0, .tv_nsec = 50000};
        (void)nanosleep(&ts, NULL);
        return;
    }
    int *const from = root->polled, *const to = from + root->size;
    int n_from = 0, n_to = 0;
    for (int r = 0; r < c->base.size; r++) {
        const struct link *const l = link_to(c, r);
        if (r == c->base.rank) continue;
        if (!l->in_gone && !l->is_stalled) from[n_from++] = c->ranks[r];
        if (l->out != NULL && !l->out_gone && !l->out_torn) to[n_to++] = c->ranks[r];
    }
    root->t.wait(root->t.ctx, from, n_from, to, n_to, SLICE_MS);
}

static dcp_status await(struct custom_group *c, struct custom_open *o)
{
    struct dcp__wait w = {0};
    while (o->n_left > 0) {
        bool moved;
        DCP_TRY(move_all(c, &moved));
        if (o->n_left == 0) break;
        if (dcp__group_is_poisoned(&c->base)) return dcp__group_poison_status(&c->base);
        if (moved) {
            w = (struct dcp__wait){0}; /* the deadline counts from the last progress */
            continue;
        }
        DCP_TRY(check_gone(c, o));
        if (dcp__wait_next(&w, 0) == DCP__WAIT_AGAIN) continue;
        if (dcp__now_ns() - w.start_ns >= c->base.deadline_ns) return poison_late(c, o);
        sleep_for_streams(c);
    }
    o->is_open = false;
    return DCP_OK;
}

/* --- the operations --- */

/* done_bytes of a flow that comes in says only that it does. */
static void post(struct custom_group *c, struct custom_open *o, enum kind kind, int peer, void *buf,
                 size_t n_bytes, bool goes_out)
{
    if (n_bytes == 0) return;
    struct flow *const f = &o->flows[o->n_flows++];
    *f = (struct flow){.head = {.kind = (uint32_t)kind, .channel = c->channel, .n_bytes = n_bytes},
                       .buf = buf,
                       .done_bytes = goes_out ? 0 : UINT64_MAX,
                       .n_left = &o->n_left,
                       .peer = peer};
    o->n_left++;
    append(goes_out ? &link_to(c, peer)->out : &link_to(c, peer)->in, f);
}

static dcp_status gather_frames(struct custom_group *c)
{
    dcp_group *const g = &c->base;
    struct frame *const own = &c->frames[g->size];
    c->frames[g->rank] = *own;
    const dcp_transport *const t = &c->root->t;
    if (t->allgather != NULL && c->channel == 0) {
        const dcp_status st =
            t->allgather(t->ctx, own, sizeof(*own), c->frames, (double)g->deadline_ns * 1e-9);
        if (st == DCP_OK) return DCP_OK;
        return dcp__group_poison(g, st, "rank %d: the transport's allgather in %s failed: %s",
                                 g->rank, dcp__call_name((uint32_t)g->call), dcp_status_text(st));
    }
    c->record.n_flows = 0;
    for (int i = 1; i < g->size; i++) {
        const int to = (g->rank + i) % g->size, from = (g->rank - i + g->size) % g->size;
        post(c, &c->record, KIND_RECORD, to, own, sizeof(*own), true);
        post(c, &c->record, KIND_RECORD, from, &c->frames[from], sizeof(*own), false);
    }
    return await(c, &c->record);
}

static dcp_status custom_record(dcp_group *g, const void *send, size_t n_bytes, void *recv)
{
    struct custom_group *const c = custom_of(g);
    struct frame *const own = &c->frames[g->size];
    own->n_bytes = n_bytes;
    if (n_bytes > 0) memcpy(own->data, send, n_bytes);
    DCP_TRY(gather_frames(c));
    for (int r = 0; r < g->size; r++) {
        if (c->frames[r].n_bytes == c->frames[0].n_bytes) continue;
        return dcp__fail(DCP_ERR_MISMATCH, "%s: rank 0 gives %llu bytes, rank %d gives %llu",
                         dcp__call_name((uint32_t)g->call),
                         (unsigned long long)c->frames[0].n_bytes, r,
                         (unsigned long long)c->frames[r].n_bytes);
    }
    for (int r = 0; r < g->size && n_bytes > 0; r++) {
        memcpy((char *)recv + (size_t)r * n_bytes, c->frames[r].data, n_bytes);
    }
    return DCP_OK;
}

static dcp_status custom_exchange_test(dcp_group *g, unsigned slot, bool *done_out)
{
    struct custom_group *const c = custom_of(g);
    struct custom_open *const o = &c->open[slot];
    bool moved;
    if (o->n_left > 0) {
        DCP_TRY(move_all(c, &moved));
        if (o->n_left > 0 && dcp__group_is_poisoned(g)) return dcp__group_poison_status(g);
        if (o->n_left > 0 && !moved) DCP_TRY(check_gone(c, o));
    }
    *done_out = o->n_left == 0;
    if (*done_out) o->is_open = false;
    return DCP_OK;
}

static dcp_status custom_exchange_start(dcp_group *g, unsigned slot, const struct dcp__xfer *sends,
                                        int n_sends, const struct dcp__xfer *recvs, int n_recvs)
{
    struct custom_group *const c = custom_of(g);
    struct custom_open *const o = &c->open[slot];
    if (o->is_open) return dcp__fail(DCP_ERR_ARG, "exchange slot %u is still open", slot);
    o->is_open = true;
    o->n_flows = 0;
    for (int i = 0; i < n_recvs; i++) {
        post(c, o, KIND_MESSAGE, recvs[i].peer, recvs[i].buf, recvs[i].n_bytes, false);
    }
    for (int i = 0; i < n_sends; i++) {
        post(c, o, KIND_MESSAGE, sends[i].peer, sends[i].buf, sends[i].n_bytes, true);
    }
    bool moved;
    return move_all(c, &moved); /* get going */
}

static dcp_status custom_exchange_wait(dcp_group *g, unsigned slot)
{
    struct custom_group *const c = custom_of(g);
    return await(c, &c->open[slot]);
}

static dcp_status custom_alloc(dcp_group *g, size_t n_bytes, void **ptr_out)
{
    void *ptr = NULL;
    const dcp_status own = dcp__local_alloc(g, n_bytes, &ptr);
    const dcp_status st = dcp__group_agree(g, "alloc", own);
    if (st == DCP_OK) {
        *ptr_out = ptr;
    } else if (ptr != NULL) {
        dcp__local_free(g, ptr);
    }
    return st;
}

/* Withdraw what this group has posted. A message that is half sent cuts the stream; of one that is
 * half received the rest is skipped. */
static void withdraw(struct custom_group *c)
{
    for (int r = 0; r < c->base.size; r++) {
        struct link *const l = link_to(c, r);
        for (int s = 0; s <= DCP__ALL_SLOTS; s++) {
            struct custom_open *const o = s < DCP__ALL_SLOTS ? &c->open[s] : &c->record;
            for (int i = 0; i < o->n_flows; i++) {
                struct flow *const f = &o->flows[i];
                if (!f->is_queued || f->peer != r) continue;
                const bool goes_out = f->done_bytes != UINT64_MAX;
                if (goes_out && f->done_bytes > 0) l->out_torn = true;
                if (l->into == f) l->into = NULL;
                take_out(goes_out ? &l->out : &l->in, f);
            }
        }
    }
}

/* Tell the peers, where their streams are between two messages; never wait. */
static void custom_poisoned(dcp_group *g)
{
    struct custom_group *const c = custom_of(g);
    const dcp_transport *const t = &c->root->t;
    withdraw(c);
    if (c->has_told) return;
    c->has_told = true;
    struct {
        struct header head;
        struct note note;
    } said = {.head = {KIND_POISON, c->channel, sizeof(struct note)},
              .note = {.code = g->poison->code, .line = g->poison->line}};
    memcpy(said.note.file, g->poison->file, sizeof(g->poison->file));
    memcpy(said.note.text, g->poison->text, sizeof(said.note.text));
    for (int r = 0; r < g->size; r++) {
        struct link *const l = link_to(c, r);
        if (r == g->rank || l->out != NULL || l->out_gone || l->out_torn) continue;
        size_t n = 0;
        const dcp_status st = t->send(t->ctx, c->ranks[r], &said, sizeof(said), &n);
        if (st != DCP_OK) l->out_gone = true;
        if (n > 0 && n < sizeof(said)) l->out_torn = true;
    }
}

static void root_release(struct custom_root *root, bool may_close)
{
    if (root == NULL || --root->n_refs > 0) return;
    if (may_close && root->t.close != NULL) root->t.close(root->t.ctx);
    dcp__free(root->polled);
    dcp__free(root->links);
    dcp__free(root);
}

static void free_handle(struct custom_group *c)
{
    dcp__local_free_list(c->base.allocs);
    dcp__free(c->flows);
    dcp__free(c->frames);
    dcp__free(c->left);
    dcp__free(c->ranks);
    dcp__group_fini(&c->base);
    dcp__free(c);
}

static void custom_destroy(dcp_group *g)
{
    struct custom_group *const c = custom_of(g);
    struct custom_group **at = &c->root->groups;
    const dcp_transport *const t = &c->root->t;
    const struct header bye = {KIND_LEFT, c->channel, 0};
    withdraw(c);
    for (int r = 0; r < g->size; r++) {
        struct link *const l = link_to(c, r);
        if (r == g->rank || l->out != NULL || l->out_gone || l->out_torn) continue;
        size_t n = 0;
        if (t->send(t->ctx, c->ranks[r], &bye, sizeof(bye), &n) != DCP_OK) l->out_gone = true;
        if (n > 0 && n < sizeof(bye)) l->out_torn = true;
    }
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    root_release(c->root, true);
    free_handle(c);
}

static dcp_status custom_split(dcp_group *g, const struct dcp__split *how, dcp_group **sub_out);

static const struct dcp__group_ops custom_ops = {
    .name = "custom",
    .record = custom_record,
    .exchange_start = custom_exchange_start,
    .exchange_test = custom_exchange_test,
    .exchange_wait = custom_exchange_wait,
    .allreduce_f32 = dcp__allreduce_sent,
    .alloc = custom_alloc,
    .free = dcp__local_free,
    .locate = dcp__any_locate,
    .peer_ptr = dcp__any_peer_ptr,
    .split = custom_split,
    .poisoned = custom_poisoned,
    .destroy = custom_destroy,
};

/* ranks: of the members in the root group, NULL: all. */
static dcp_status create(struct custom_root *root, uint32_t channel, int rank, int size,
                         const int *ranks, const struct dcp__group_opts *opts,
                         dcp_group **group_out)
{
    const size_t n = (size_t)size, per_slot = 2 * dcp__xfers_max(size);
    void *mem;
    DCP_TRY(dcp__alloc(sizeof(struct custom_group), "custom group", &mem));
    struct custom_group *const c = mem;
    dcp_status st = dcp__group_init(&c->base, &custom_ops, rank, size, opts->deadline_ns, NULL);
    if (st != DCP_OK) {
        dcp__free(c);
        return st;
    }
    c->channel = channel;
    st = dcp__alloc_array(n, sizeof(int), "ranks of a custom group", &mem);
    if (st != DCP_OK) goto err;
    c->ranks = mem;
    for (int r = 0; r < size; r++) c->ranks[r] = r; /* every rank is a host: number them */
    st = dcp__group_set_hosts(&c->base, c->ranks, 0);
    if (st != DCP_OK) goto err;
    st = dcp__alloc_array(n, sizeof(bool), "ranks of a custom group", &mem);
    if (st != DCP_OK) goto err;
    c->left = mem;
    if (ranks != NULL) memcpy(c->ranks, ranks, n * sizeof(int));
    st = dcp__alloc_array(n + 1, sizeof(struct frame), "records of a custom group", &mem);
    if (st != DCP_OK) goto err;
    c->frames = mem;
    st = dcp__alloc_array((DCP__ALL_SLOTS + 1) * per_slot, sizeof(struct flow),
                          "messages of a custom group", &mem);
    if (st != DCP_OK) goto err;
    c->flows = mem;
    for (size_t s = 0; s < DCP__ALL_SLOTS; s++) c->open[s].flows = c->flows + s * per_slot;
    c->record.flows = c->flows + DCP__ALL_SLOTS * per_slot;
    c->root = root;
    root->n_refs++;
    c->next = root->groups;
    root->groups = c;
    *group_out = &c->base;
    return DCP_OK;
err:
    free_handle(c);
    return st;
}

/* The channel is above all that any rank of the parent has used: the same for all sub-groups of the
 * split, which have no two ranks in common. */
static dcp_status custom_split(dcp_group *g, const struct dcp__split *how, dcp_group **sub_out)
{
    struct custom_group *const c = custom_of(g);
    const uint32_t own = c->root->next_channel;
    uint32_t *const all = g->scratch;
    DCP_TRY(g->ops->record(g, &own, sizeof(own), all));
    uint32_t channel = own;
    for (int r = 0; r < g->size; r++) channel = all[r] > channel ? all[r] : channel;
    dcp_group *sub = NULL;
    dcp_status st = DCP_OK;
    if (how->size > 0) {
        void *mem;
        st = dcp__alloc_array((size_t)how->size, sizeof(int), "ranks of a sub-group", &mem);
        if (st == DCP_OK) {
            int *const ranks = mem;
            for (int i = 0; i < how->size; i++) ranks[i] = c->ranks[how->members[i]];
            const struct dcp__group_opts opts = {.deadline_ns = g->deadline_ns};
            st = create(c->root, channel, how->rank, how->size, ranks, &opts, &sub);
            dcp__free(ranks);
        }
    }
    c->root->next_channel = channel + 1;
    st = dcp__group_agree(g, "split", st);
    if (st != DCP_OK) {
        dcp_group_destroy(sub);
        return st;
    }
    *sub_out = sub;
    return DCP_OK;
}

static dcp_status copy_table(const dcp_transport *transport, dcp_transport *mine)
{
    if (transport == NULL || transport->struct_size < sizeof(size_t)) {
        return dcp__fail(DCP_ERR_ARG, "create_custom: %s",
                         transport == NULL ? "transport is NULL"
                                           : "struct_size is not set; use DCP_TRANSPORT_INIT");
    }
    for (size_t i = sizeof(*mine); i < transport->struct_size; i++) {
        if (((const unsigned char *)transport)[i] == 0) continue;
        return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                         "dcp_transport has operations that this library (%s) does not know",
                         DCP_VERSION);
    }
    memcpy(mine, transport,
           transport->struct_size < sizeof(*mine) ? transport->struct_size : sizeof(*mine));
    if (mine->send != NULL && mine->recv != NULL) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG, "create_custom: transport.%s is NULL",
                     mine->send == NULL ? "send" : "recv");
}

dcp_status dcp_group_create_custom(const dcp_transport *transport, int rank, int n,
                                   const dcp_group_opts *opts, dcp_group **group_out)
{
    if (group_out == NULL) return dcp__fail(DCP_ERR_ARG, "create_custom: group_out is NULL");
    dcp_transport mine = DCP_TRANSPORT_INIT;
    DCP_TRY(copy_table(transport, &mine));
    if (n < 1 || n > 4096 || rank < 0 || rank >= n) {
        return dcp__fail(DCP_ERR_ARG, "create_custom: rank %d of %d; 1 to 4096 ranks are possible",
                         rank, n);
    }
    struct dcp__group_opts own;
    DCP_TRY(dcp__group_opts_read(opts, &own));
    DCP_TRY(dcp__group_load_fault(n, true));
    void *mem;
    DCP_TRY(dcp__alloc(sizeof(struct custom_root), "custom group", &mem));
    struct custom_root *const root = mem;
    root->t = mine;
    root->size = n;
    root->next_channel = 1;
    root->n_refs = 1; /* of this call, until the handle is there */
    dcp_status st = dcp__alloc_array((size_t)n, sizeof(struct link), "streams", &mem);
    if (st == DCP_OK) {
        root->links = mem;
        st = dcp__alloc_array(2 * (size_t)n, sizeof(int), "streams", &mem);
    }
    if (st == DCP_OK) {
        root->polled = mem;
        st = create(root, 0, rank, n, NULL, &own, group_out);
    }
    root_release(root, false);
    return st;
}
