// Entry point of the HTML file: reads the data embedded in the document.
import { App } from "./app";
import type { PageData } from "./data";
import { fromBase64 } from "./maps";

const root = document.getElementById("attnlens") as HTMLElement;
document.body.classList.add("attnlens-page");
const textOf = (id: string): string => document.getElementById(id)?.textContent ?? "";

if (typeof DecompressionStream === "undefined") {
  root.textContent = "This browser does not support DecompressionStream. Use a version from 2023 or later.";
} else {
  const page = JSON.parse(textOf("attnlens-data")) as PageData;
  const app = new App(root, page, {
    compressed: (text, layer) => fromBase64(textOf(`attnlens-maps-${text}-${layer}`)),
  });
  void app.refresh();
}
