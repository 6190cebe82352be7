// One row of the attention map as numbers: the text alternative of the heat map.
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
      ...top.map((index) => {
        const bar = element("i", { class: "plus" });
        bar.style.width = `${100 * weights[index]}%`;
        return element(
          "tr",
          {},
          element("th", { scope: "row", dir: "auto" }, short(units[index].shown)),
          element("td", { class: "number" }, weightText(weights[index])),
          element("td", { class: "gauge" }, bar),
        );
      }),
    );
    const rest = weights.reduce((sum, weight) => sum + weight, 0) - top.reduce((sum, index) => sum + weights[index], 0);
    const others = units.length - top.length;
    const parts = others > 0 ? [`Remaining ${others}: ${weightText(rest)} in total.`] : [];
    if (matrix.hidden[row] > 0.005) {
      parts.push(`Hidden special tokens account for ${percentText(matrix.hidden[row])} of this row. The remaining weights are scaled to 1.`);
    }
    this.rest.textContent = parts.join(" ");
  }
}

/** Describe the row in a sentence for screen readers. */
export function rowSentence(frame: Frame): string {
  const { units, matrix, chosen, state } = frame;
  const weights = matrix.values.subarray(chosen * matrix.size, (chosen + 1) * matrix.size);
  const top = largest(weights, 3).map((index) => `${short(units[index].shown)} ${weightText(weights[index])}`);
  const head = state.head === null ? "mean of heads" : `head ${state.head}`;
  return `Layer ${state.layer}, ${head}. ${short(units[chosen].shown)} attends to ${top.join(", ")}.`;
}
