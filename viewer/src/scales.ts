// Printed scales: which colour stands for which number.
import { css, signedTable, type Table } from "./colour";
import { element } from "./dom";
import { plainText } from "./numbers";

const TICKS = [0, 0.05, 0.2, 0.5, 1];

/** The scale of weights: colours follow the square root, so that small weights are told apart. */
export function weightScale(): { element: HTMLElement; draw(table: Table): void } {
  const canvas = element("canvas", { width: 256, height: 1, class: "ramp", "aria-hidden": "true" });
  const ticks = element("div", { class: "ticks" }, ...TICKS.map((weight) => tick(Math.sqrt(weight), String(weight))));
  const made = element("div", { class: "scale" }, element("span", {}, "weight"), element("div", { class: "rule" }, canvas, ticks));
  return { element: made, draw: (table) => paint(canvas, table) };
}

/** The scale of signed numbers from -extent to extent. */
export function signedScale(): { element: HTMLElement; draw(extent: number, dark: boolean): void } {
  const canvas = element("canvas", { width: 256, height: 1, class: "ramp", "aria-hidden": "true" });
  const ticks = element("div", { class: "ticks" });
  const made = element("div", { class: "scale signed" }, element("div", { class: "rule" }, canvas, ticks));
  return {
    element: made,
    draw(extent, dark) {
      paint(canvas, signedTable(dark));
      const texts = [-extent, 0, extent].map((value) => (value === 0 ? "0" : plainText(value)));
      ticks.replaceChildren(...texts.map((text, place) => tick(place / 2, text)));
    },
  };
}

function tick(position: number, text: string): HTMLElement {
  const made = element("span", {}, text);
  made.style.left = `${100 * position}%`;
  return made;
}

function paint(canvas: HTMLCanvasElement, table: Table): void {
  const context = canvas.getContext("2d") as CanvasRenderingContext2D;
  const image = context.createImageData(256, 1);
  new Uint32Array(image.data.buffer).set(table);
  context.putImageData(image, 0, 0);
  canvas.dataset.middle = css(table, 128);
}
