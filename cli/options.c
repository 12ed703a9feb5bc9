/* SPDX-License-Identifier: Apache-2.0 */
/* The parser reads the table; nothing here knows a command. */
#include "cli/options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/message.h"

enum { NAME_MAX_BYTES = 64 };

struct parse {
    const struct command_def *cmd;
    char *values;
    char *error;
    size_t error_bytes;
};

static bool complain(const struct parse *p, const char *option, const char *value, const char *want)
{
    if (value != NULL) {
        snprintf(p->error, p->error_bytes, "%s: '%s' is not right: %s", option, value, want);
    } else {
        snprintf(p->error, p->error_bytes, "%s: %s", option, want);
    }
    return false;
}

const char *options_choice(const char *choices, int i, char *buf, size_t n_bytes)
{
    const char *at = choices;
    for (; i > 0 && at != NULL; i--) {
        at = strchr(at, '|');
        if (at != NULL) at++;
    }
    if (at == NULL) return "?";
    snprintf(buf, n_bytes, "%.*s", (int)strcspn(at, "|"), at);
    return buf;
}

static bool set_enum(const struct parse *p, const struct option_def *o, const char *label,
                     const char *text)
{
    const char *const choices = o->choices != NULL ? o->choices : "";
    int index = 0;
    for (const char *at = choices; at != NULL; index++) {
        const size_t len = strcspn(at, "|");
        if (strlen(text) == len && strncmp(at, text, len) == 0) {
            memcpy(p->values + o->offset, &index, sizeof(index));
            return true;
        }
        at = at[len] == '|' ? at + len + 1 : NULL;
    }
    char want[256];
    snprintf(want, sizeof(want), "one of %s", choices);
    return complain(p, label, text, want);
}

/* Whole text as a number; a size may end in K, M or G. */
static bool read_number(const char *text, enum option_type type, double *value_out,
                        int64_t *int_out)
{
    char *end = NULL;
    errno = 0;
    if (text[0] == '\0' || isspace((unsigned char)text[0])) return false;
    if (type == OPT_INT) {
        const long long v = strtoll(text, &end, 10);
        *int_out = v;
        *value_out = (double)v;
        return errno == 0 && *end == '\0';
    }
    const double v = strtod(text, &end);
    if (errno != 0 || end == text || isnan(v)) return false;
    double unit = 1.0;
    if (type == OPT_SIZE && *end != '\0') {
        const char *units = "KMG";
        const char *hit = strchr(units, toupper((unsigned char)*end));
        if (hit == NULL) return false;
        unit = ldexp(1.0, 10 * (int)(hit - units + 1));
        end++;
    }
    *value_out = v * unit;
    return *end == '\0';
}

/* A limit as a user would write it: sizes with the largest unit that leaves a whole number; the
 * upper limits, round numbers of another kind, are rounded down to one. */
static void number_text(const struct option_def *o, double v, char *buf, size_t n_bytes)
{
    static const char *const units[] = {"", "K", "M", "G"};
    int u = 0;
    if (o->type == OPT_SIZE) {
        while (u < 3 && v >= 1024.0 && (fmod(v, 1024.0) == 0.0 || v >= 0x1p20)) {
            v = floor(v / 1024.0);
            u++;
        }
    }
    snprintf(buf, n_bytes, "%.15g%s", v, units[u]);
}

static bool set_number(const struct parse *p, const struct option_def *o, const char *label,
                       const char *text)
{
    double v = 0.0;
    int64_t i = 0;
    const char *kind = o->type == OPT_INT    ? "an integer"
                       : o->type == OPT_SIZE ? "bytes (K, M or G behind if wanted)"
                                             : "a number";
    char want[160], min[32], max[32];
    number_text(o, o->min, min, sizeof(min));
    number_text(o, o->max, max, sizeof(max));
    if (o->max < HUGE_VAL) {
        snprintf(want, sizeof(want), "%s from %s to %s", kind, min, max);
    } else {
        snprintf(want, sizeof(want), "%s from %s on", kind, min);
    }
    if (!read_number(text, o->type, &v, &i) || v < o->min || v > o->max || isinf(v))
        return complain(p, label, text, want);
    void *at = p->values + o->offset;
    if (o->type == OPT_INT) {
        memcpy(at, &i, sizeof(i));
    } else if (o->type == OPT_SIZE) {
        const uint64_t u = (uint64_t)v;
        memcpy(at, &u, sizeof(u));
    } else {
        memcpy(at, &v, sizeof(v));
    }
    return true;
}

static bool set_value(const struct parse *p, const struct option_def *o, const char *label,
                      const char *text)
{
    if (o->type == OPT_ENUM) return set_enum(p, o, label, text);
    if (o->type != OPT_STRING) return set_number(p, o, label, text);
    if (text[0] == '\0')
        return complain(p, label, NULL, "the text is empty; at least one character is needed");
    memcpy(p->values + o->offset, &text, sizeof(text));
    return true;
}

static void set_flag(const struct parse *p, const struct option_def *o, bool on)
{
    memcpy(p->values + o->offset, &on, sizeof(on));
}

static void env_name(const struct option_def *o, char *buf, size_t n_bytes)
{
    snprintf(buf, n_bytes, "DCP_ATTN_%s", o->name);
    for (char *c = buf; *c != '\0'; c++) *c = *c == '-' ? '_' : (char)toupper((unsigned char)*c);
}

static bool read_environment(const struct parse *p)
{
    for (size_t i = 0; i < p->cmd->n_options; i++) {
        const struct option_def *o = &p->cmd->options[i];
        char name[NAME_MAX_BYTES];
        env_name(o, name, sizeof(name));
        const char *text = getenv(name);
        if (text == NULL || text[0] == '\0') continue;
        if (o->type != OPT_FLAG) {
            if (!set_value(p, o, name, text)) return false;
        } else if (strcmp(text, "1") == 0 || strcmp(text, "0") == 0) {
            set_flag(p, o, text[0] == '1');
        } else {
            return complain(p, name, text, "0 or 1");
        }
    }
    return true;
}

static const struct option_def *find_long(const struct command_def *cmd, const char *name,
                                          size_t len)
{
    for (size_t i = 0; i < cmd->n_options; i++) {
        const struct option_def *o = &cmd->options[i];
        if (strlen(o->name) == len && strncmp(o->name, name, len) == 0) return o;
    }
    return NULL;
}

static const struct option_def *find_letter(const struct command_def *cmd, char letter)
{
    for (size_t i = 0; i < cmd->n_options; i++) {
        if (cmd->options[i].letter == letter) return &cmd->options[i];
    }
    return NULL;
}

/* One option at argv[*i]; *i moves past its value. */
static bool read_option(const struct parse *p, int argc, char **argv, int *i)
{
    const char *arg = argv[*i];
    const bool is_long = arg[1] == '-';
    const char *attached = NULL;
    const struct option_def *o = NULL;
    char label[NAME_MAX_BYTES];
    if (is_long) {
        const size_t len = strcspn(arg + 2, "=");
        o = find_long(p->cmd, arg + 2, len);
        if (arg[2 + len] == '=') attached = arg + 3 + len;
        snprintf(label, sizeof(label), "--%.*s", (int)len, arg + 2);
    } else {
        o = find_letter(p->cmd, arg[1]);
        if (arg[2] != '\0') attached = arg + 2;
        snprintf(label, sizeof(label), "-%c", arg[1]);
    }
    if (o == NULL) {
        char want[160];
        snprintf(want, sizeof(want), "'%s' has no such option; see dcp-attn %s --help",
                 p->cmd->name, p->cmd->name);
        return complain(p, label, NULL, want);
    }
    if (o->type == OPT_FLAG) {
        if (attached != NULL) return complain(p, label, attached, "it takes no value");
        set_flag(p, o, true);
        return true;
    }
    if (attached == NULL) {
        if (*i + 1 >= argc) return complain(p, label, NULL, "a value must follow");
        attached = argv[++*i];
    }
    return set_value(p, o, label, attached);
}

enum options_result options_parse(const struct command_def *cmd, int argc, char **argv,
                                  void *values, char **operands_out, int *n_operands_out,
                                  char *error_out, size_t error_bytes)
{
    const struct parse p = {cmd, values, error_out, error_bytes};
    int n = 0;
    bool only_operands = false;
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--") == 0) break;
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return OPTIONS_HELP;
    }
    if (!read_environment(&p)) return OPTIONS_BAD;
    for (int i = 0; i < argc; i++) {
        if (!only_operands && strcmp(argv[i], "--") == 0) {
            only_operands = true;
        } else if (only_operands || argv[i][0] != '-' || argv[i][1] == '\0') {
            operands_out[n++] = argv[i];
        } else if (!read_option(&p, argc, argv, &i)) {
            return OPTIONS_BAD;
        }
    }
    *n_operands_out = n;
    if (n < cmd->min_operands) {
        snprintf(error_out, error_bytes, "%s is missing", cmd->operands);
        return OPTIONS_BAD;
    }
    if (n > cmd->max_operands) {
        snprintf(error_out, error_bytes, "'%s' is one argument too many; options start with a dash",
                 operands_out[cmd->max_operands]);
        return OPTIONS_BAD;
    }
    return OPTIONS_RUN;
}

static void print_option(FILE *to, const char *left, const char *help)
{
    enum { LEFT_COLUMNS = 28, INDENT = LEFT_COLUMNS + 4 };
    char head[192];
    snprintf(head, sizeof(head), "  %s", left);
    if (strlen(left) > LEFT_COLUMNS) {
        fprintf(to, "%s\n", head);
        head[0] = '\0';
    }
    message_fold(to, head, INDENT, help);
}

/* Lines of a text as paragraphs: one that begins with two spaces is an item of a list, one with
 * more goes on with it. Line ends inside of a paragraph are spaces. */
static void print_paragraphs(FILE *to, const char *text)
{
    enum { ITEM_INDENT = 14 };
    char buf[2048];
    while (*text != '\0') {
        const size_t begin = strspn(text, " ");
        size_t n = 0;
        while (*text != '\0') {
            const size_t len = strcspn(text, "\n"), skip = n == 0 ? 0 : strspn(text, " ");
            if (n > 0 && (skip == 2 || (skip == 0) != (begin == 0))) break;
            const int put = snprintf(buf + n, sizeof(buf) - n, "%s%.*s", n > 0 ? " " : "",
                                     (int)(len - skip), text + skip);
            n = (size_t)put < sizeof(buf) - n ? n + (size_t)put : sizeof(buf) - 1;
            text += len;
            if (*text == '\n') text++;
        }
        if (begin == 0 || n <= ITEM_INDENT) {
            message_fold(to, "", 0, buf);
        } else {
            char head[ITEM_INDENT + 1];
            snprintf(head, sizeof(head), "%.*s", ITEM_INDENT, buf);
            message_fold(to, head, ITEM_INDENT, buf + ITEM_INDENT);
        }
    }
}

void options_help(const struct command_def *cmd, FILE *to)
{
    fprintf(to, "Usage: dcp-attn %s [options]%s%s\n\n", cmd->name, cmd->operands[0] ? " " : "",
            cmd->operands);
    print_paragraphs(to, cmd->summary);
    fputs("\nOptions:\n", to);
    for (size_t i = 0; i < cmd->n_options; i++) {
        const struct option_def *o = &cmd->options[i];
        char left[160];
        char letter[8] = "    ";
        if (o->letter != 0) snprintf(letter, sizeof(letter), "-%c, ", o->letter);
        snprintf(left, sizeof(left), "%s--%s%s%s", letter, o->name, o->type == OPT_FLAG ? "" : " ",
                 o->type == OPT_FLAG   ? ""
                 : o->type == OPT_ENUM ? o->choices
                                       : o->metavar);
        print_option(to, left, o->help);
    }
    print_option(to, "-h, --help", "this text");
    fprintf(to, "\nA long option can also be given in the environment: --kv-dtype as\n"
                "DCP_ATTN_KV_DTYPE. The flag wins. Flags without a value take 0 or 1 there; a\n"
                "DCP_ATTN_ name that the command does not know is ignored.\n");
    if (cmd->notes != NULL) {
        putc('\n', to);
        print_paragraphs(to, cmd->notes);
    }
}
