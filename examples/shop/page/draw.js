// What anybody can compute about a draw from its public list, and an entrant from their receipt. A browser can do it for
// some ten thousand entries; stampede draw verify does it for any number, and verifies the seed and the offers, too.

const RECORD = 33; // bytes of the list for each entry
const TAG = 16; // bytes of a receipt that sign it: they are no part of the entry

const sha256 = async (...parts) => new Uint8Array(await crypto.subtle.digest("SHA-256", await new Blob(parts).arrayBuffer()));
const hex = (bytes) => [...bytes].map((b) => b.toString(16).padStart(2, "0")).join("");
const unhex = (text) => Uint8Array.from(text.match(/../g), (digits) => parseInt(digits, 16));
const decode = (text) => Uint8Array.from(atob(text.replace(/-/g, "+").replace(/_/g, "/")), (c) => c.charCodeAt(0));

// rootOf is the root of leaves, by RFC 6962.
async function rootOf(leaves) {
  if (leaves.length === 1) return leaves[0];
  let left = 1;
  while (2 * left < leaves.length) left *= 2;
  return sha256(Uint8Array.of(1), await rootOf(leaves.slice(0, left)), await rootOf(leaves.slice(left)));
}

// verify returns the place and the rank of a receipt's entry. It throws an error for a list that lacks the entry, or is
// not the one that was frozen.
export async function verify(list, receipt, { root, seed }) {
  const records = Array.from({ length: list.length / RECORD }, (_, i) => list.subarray(i * RECORD, (i + 1) * RECORD));
  const own = hex(await sha256(decode(receipt).slice(0, -TAG)));
  const place = records.findIndex((record) => hex(record.subarray(1)) === own);
  if (place < 0) throw new Error("your entry is not in the list");
  const leaves = await Promise.all(records.map((record) => sha256(Uint8Array.of(0), record)));
  if (hex(await rootOf(leaves)) !== root) throw new Error("the list has another root than the one that was published");
  const scores = await Promise.all(leaves.map(async (leaf) => hex(await sha256(unhex(seed), leaf))));
  const rank = scores.filter((score, i) => records[i][0] === records[place][0] && score < scores[place]).length;
  return { place, rank };
}

// isWitness is true for what the shop says of a draw after its list is fixed, and before anybody knows the seed.
export const isWitness = (draw, now) => Boolean(draw.root && draw.frozen_at) && !draw.seed &&
  !(draw.round_at && now >= Date.parse(draw.round_at));

const ENDINGS = { one: "st", two: "nd", few: "rd", other: "th" };
const ordinals = new Intl.PluralRules("en", { type: "ordinal" });
const ordinal = (index) => `${index + 1}${ENDINGS[ordinals.select(index + 1)]}`;

// nth says a place or a rank, which are counted from 0, as a person counts: 7th of 7.
export const nth = (index, draw) => `${ordinal(index)} of ${draw.entries}`;

// nthRank says a rank, which in a draw of sizes is one among the entries of the proof's size.
export const nthRank = (rank, proof, draw) => (proof.item ? `${ordinal(rank)} in your size` : nth(rank, draw));

// words tell an entrant how far the draw is. The proof is missing until the list is frozen, and the order until one is
// offered. They are read aloud, so they have nothing that changes each second.
export function words(draw, proof, order) {
  if (draw.state === "void") return `The draw is void: ${draw.void_reason}. Nothing is offered.`;
  if (proof?.outcome === "missing") {
    return "Your entry is not in the list: it " + (proof.status === "cancelled" ? "was cancelled." : "was lost by the shop.");
  }
  if (proof?.outcome === "skipped") {
    return "Your turn was skipped: " + (proof.reason === "entry-cancelled" ? "the entry was cancelled." : "you had an order already.");
  }
  if (proof?.outcome === "offered") {
    return "A shirt was offered to you" + ({
      paid: ", and you have paid for it.",
      expired: ". That is over: it was not paid in time.",
      cancelled: ". That is over: the order was cancelled.",
      rejected: ". That is over: the shop could not keep it.",
      voided: ". That is over: the shop has lost the order.",
    }[order?.status] ?? ": see the order below.");
  }
  const rank = proof?.rank === undefined ? "" : nthRank(proof.rank, proof, draw);
  const over = "The draw is over" + (rank ? `, and it did not come to you: you were ${rank}.` : ".");
  return {
    entering: "You are in. When the entries close, their list is fixed, and its fingerprint is published: nobody changes " +
      "it unseen after that.",
    freezing: "The entries are closed. Their list is being fixed.",
    frozen: "The list is fixed. " + (draw.parties
      ? "Each party reveals its secret now: together they make the random number that draws."
      : `A public random number draws at ${new Date(draw.round_at).toLocaleTimeString()}: round ${draw.round} of drand.`),
    ranking: "The random number is known, and the order of the entries is computed from it.",
    offering: (rank ? `You are ${rank}. ` : "") + "Shirts are offered in the order that was drawn. One that is not paid in " +
      "time goes to the next.",
    over,
    open: over + " What is left is sold to everybody.",
  }[draw.state];
}
