// One row in numbers: the text alternative of the map.
import { element, short } from "../dom";
import { percentText, weightText } from "../numbers";
import type { Frame } from "../state";
import { largest } from "../units";

const SHOWN = 5;

export class RowView {
  readonly element: HTMLElement;
  private readonly caption = element("caption");
  private readonly body = element("tbody");
  private readonly rest = element("p", { class: "about" });

  constructor() {
    const table = element("table", { class: "bars row" }, this.caption, this.body);
    this.element = element("div", { class: "read-out" }, table, this.rest);
  }

  draw(frame: Frame): void {
    const { units, matrix, row } = frame;
    const weights = matrix.values.subarray(row * matrix.size, (row + 1) * matrix.size);
    const top = largest(weights, SHOWN);
    const { shown, spelling } = units[row];
    const spelled = spelling.toLowerCase() === shown.toLowerCase() ? "" : ` (${short(spelling)})`;
    this.caption.replaceChildren(element("b", { dir: "auto" }, short(shown)), `${spelled} attends to`);
    this.body.replaceChildren(
      ...top.map((place) => {
        const bar = element("i", { class: "plus" });
        bar.style.width = `${100 * weights[place]}%`;
        return element(
          "tr",
          {},
          element("th", { scope: "row", dir: "auto" }, short(units[place].shown)),
          element("td", { class: "number" }, weightText(weights[place])),
          element("td", { class: "gauge" }, bar),
        );
      }),
    );
    const rest = weights.reduce((sum, weight) => sum + weight, 0) - top.reduce((sum, place) => sum + weights[place], 0);
    const others = units.length - top.length;
    const parts = others > 0 ? [`${others} more share ${weightText(rest)}.`] : [];
    if (matrix.hidden[row] > 0.005) {
      parts.push(`Special tokens had ${percentText(matrix.hidden[row])} of this row; the rest is scaled to 1.`);
    }
    this.rest.textContent = parts.join(" ");
  }
}

/** The row in a sentence, for who listens. */
export function rowSentence(frame: Frame): string {
  const { units, matrix, chosen, state } = frame;
  const weights = matrix.values.subarray(chosen * matrix.size, (chosen + 1) * matrix.size);
  const top = largest(weights, 3).map((place) => `${short(units[place].shown)} ${weightText(weights[place])}`);
  const head = state.head === null ? "mean of heads" : `head ${state.head}`;
  return `Layer ${state.layer}, ${head}. ${short(units[chosen].shown)} attends to ${top.join(", ")}.`;
}
