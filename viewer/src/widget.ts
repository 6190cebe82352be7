// Entry point of the notebook widget: anywidget and marimo call `render`.
import { App } from "./app";
import type { PageData } from "./data";

interface Model {
  get(name: "page"): PageData;
  get(name: "maps"): (DataView | Uint8Array)[];
}

function render({ model, el }: { model: Model; el: HTMLElement }): void {
  const page = model.get("page");
  const maps = model.get("maps").map((part) => new Uint8Array(part.buffer, part.byteOffset, part.byteLength));
  const root = document.createElement("div");
  el.append(root);
  const [{ layers }] = page.texts;
  void new App(root, page, { compressed: (text, layer) => maps[text * layers + layer] }).refresh();
}

export default { render };
