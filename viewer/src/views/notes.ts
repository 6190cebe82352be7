// What the page does not mean, and how exact it is.
import type { PageData, ScoresData } from "../data";
import { element, section } from "../dom";
import { plainText } from "../numbers";

export function notes(page: PageData): HTMLElement {
  const items = [
    "Attention is not an explanation. A weight says how much of a token's value a head mixes in; a large weight on " +
      "a value that is nearly zero does nothing. Special tokens often take the attention that a head has no use for.",
    "One head is one of many, and every layer adds to what it was given. That a head looks from one word to " +
      "another does not mean that the model has drawn a conclusion.",
    ...page.texts[0].scores.flatMap(caveat),
    ...page.notes,
    "Weights are stored in a byte each, as the square root: they are exact to 0.004, small ones to less. Words: " +
      "a row is the mean over its tokens, a column the sum.",
  ];
  if (page.kept !== null) {
    const why = page.reason === "size" ? "All weights would have made the page too large: it" : "This page was made small: it";
    items.push(`${why} holds the ${page.kept} largest weights of each row. The others are shown as 0, and rows add up to less than 1.`);
  }
  return section("notes", "What this does not mean", null, element("ul", {}, ...items.map((text) => element("li", {}, text))));
}

function caveat(scores: ScoresData): string[] {
  if (scores.rho === null) return [];
  return [
    `Scores by ${scores.method} agree with what leaving a token out does to the embedding by a rank correlation of ` +
      `${plainText(scores.rho, 2)}: 1 would be the same order, 0 none.`,
  ];
}
