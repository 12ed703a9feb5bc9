/* SPDX-License-Identifier: Apache-2.0 */
/* What the chat files share: which family a template is of, and rendering into a marked text. */
#ifndef DCP_ENGINE_CHAT_PRIV_H
#define DCP_ENGINE_CHAT_PRIV_H

#include "engine/chat.h"

enum chat_family { CHAT_UNKNOWN, CHAT_CHATML, CHAT_LLAMA2, CHAT_LLAMA3, CHAT_MISTRAL, CHAT_GEMMA };
enum chat_family chat__family(const char *chat_template);

#endif
