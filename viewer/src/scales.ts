// Color scale legends.
import { css, signedTable, type Table } from "./color";
import { element } from "./dom";
import { plainText } from "./numbers";

const TICKS = [0, 0.05, 0.2, 0.5, 1];

/** Create the legend of weights. Colors follow the square root, so that small weights are distinguishable. */
export function weightScale(): { element: HTMLElement; draw(table: Table): void } {
  const canvas = element("canvas", { width: 256, height: 1, class: "ramp", "aria-hidden": "true" });
  const ticks = element("div", { class: "ticks" }, ...TICKS.map((weight) => tick(Math.sqrt(weight), String(weight))));
  const legend = element("div", { class: "scale" }, element("span", {}, "weight"), element("div", { class: "rule" }, canvas, ticks));
  return { element: legend, draw: (table) => paint(canvas, table) };
}

/** Create the legend of signed scores from -extent to extent. */
export function signedScale(): { element: HTMLElement; draw(extent: number, dark: boolean): void } {
  const canvas = element("canvas", { width: 256, height: 1, class: "ramp", "aria-hidden": "true" });
  const ticks = element("div", { class: "ticks" });
  const legend = element("div", { class: "scale signed" }, element("div", { class: "rule" }, canvas, ticks));
  return {
    element: legend,
    draw(extent, dark) {
      paint(canvas, signedTable(dark));
      const texts = [-extent, 0, extent].map((value) => (value === 0 ? "0" : plainText(value)));
      ticks.replaceChildren(...texts.map((text, index) => tick(index / 2, text)));
    },
  };
}

function tick(position: number, text: string): HTMLElement {
  const label = element("span", {}, text);
  label.style.left = `${100 * position}%`;
  return label;
}

function paint(canvas: HTMLCanvasElement, table: Table): void {
  const context = canvas.getContext("2d") as CanvasRenderingContext2D;
  const image = context.createImageData(256, 1);
  new Uint32Array(image.data.buffer).set(table);
  context.putImageData(image, 0, 0);
  canvas.dataset.middle = css(table, 128);
}
