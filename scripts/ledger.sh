#!/usr/bin/env bash
# A document of about 2,000 tokens with one fact hidden in it, and a question about the fact: the
# same text for the same number of lines. Usage: ledger.sh [LINES]
set -euo pipefail
lines=${1:-60}
awk -v lines="$lines" 'BEGIN {
    # A small linear congruential generator: the same text on every machine.
    state = 20250207
    split("barley seed,linen sheets,lamp oil,copper wire,roof slates,ink bottles,wax candles,oak barrels", goods, ",")
    split("mill,quay,stable,attic,chapel,market,bridge,garden", places, ",")
    split("the warden,the old miller,the ferry clerk,the baker", people, ",")
    secret = int(lines * 0.4)
    for (i = 1; i <= lines; i++) {
        if (i == secret) {
            print "Line " i ": the code of the vault is 5283, and nobody but the keeper may know it."
            continue
        }
        print "Line " i ": " 2 + draw(60) " boxes of " goods[1 + draw(8)] " went from the " places[1 + draw(8)] \
            " to the " places[1 + draw(8)] " under number " 100 + draw(900) ", signed by " people[1 + draw(4)] "."
    }
    print ""
    print "What is the code of the vault?"
}
function draw(n) {
    state = (state * 1103515 + 12345) % 2147483648
    return int(state / 65536) % n
}'
