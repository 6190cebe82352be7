// Caveats: the limits of attention maps and scores, and their precision.
import type { PageData, ScoresData } from "../data";
import { element, section } from "../dom";
import { plainText } from "../numbers";

export function notes(page: PageData): HTMLElement {
  const items = [
    "Attention is not an explanation. A weight is the share of a token's value in the output of a head: a large " +
      "weight on a value close to zero has no effect. Heads often attend to special tokens as a no-op.",
    "Each head is one of many, and every layer adds its output to its input. Attention from one word to another " +
      "does not imply that the model uses the relation between them.",
    ...page.texts[0].scores.flatMap(caveat),
    ...page.notes,
    "The square root of each weight is stored in one byte. The error is at most 0.004, and less for small weights. " +
      "For words, rows are averaged and columns summed over their tokens.",
  ];
  if (page.kept !== null) {
    const why = page.reason === "size" ? "The complete weights exceed the size limit of a page." : "A small page was requested.";
    items.push(`${why} It contains the ${page.kept} largest weights of each row. All other weights are shown as 0, and rows add up to less than 1.`);
  }
  return section("notes", "What this does not mean", null, element("ul", {}, ...items.map((text) => element("li", {}, text))));
}

function caveat(scores: ScoresData): string[] {
  if (scores.rho === null) return [];
  return [
    `Scores of ${scores.method} have a rank correlation of ${plainText(scores.rho, 2)} with leave-one-out scores: ` +
      "1 means the same order, 0 no relation.",
  ];
}
