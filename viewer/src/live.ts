// The page that a server shows: a form, and below it what a file shows, fetched from the same server.
import { App } from "./app";
import type { PageData } from "./data";
import { element } from "./dom";
import { fromBase64 } from "./maps";

interface Found {
  page: PageData;
  maps: string[]; // of each text and layer, as in the file
}

const root = document.getElementById("attnlens") as HTMLElement;
document.body.classList.add("attnlens-page");

const shown = element("div");
const told = element("p", { class: "told", role: "status" });
const button = element("button", { type: "submit", class: "toggle show" }, "Show");
const fields = [field("Text", true), field("Compare with", false), field("Rather than", false)];
const form = element("form", { class: "live-form", autocomplete: "off" }, ...fields.map(([label]) => label), element("div", {}, button, told));
root.replaceChildren(element("div", { class: "attnlens live" }, form), shown);

let app: App | null = null;
let running: AbortController | null = null;

function field(name: string, required: boolean): [HTMLElement, HTMLTextAreaElement] {
  const area = element("textarea", { rows: 2, dir: "auto", required, spellcheck: "false" });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  return [element("label", {}, element("span", {}, required ? name : `${name} (optional)`), area), area];
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  void show();
});

async function show(): Promise<void> {
  running?.abort();
  const own = (running = new AbortController());
  told.textContent = "Asking the model…";
  told.classList.remove("wrong");
  try {
    const found = await fetched(own.signal);
    if (own !== running) return;
    app?.close();
    const { layers } = found.page.texts[0];
    app = new App(shown, found.page, { compressed: (text, layer) => fromBase64(found.maps[text * layers + layer]) });
    await app.refresh();
    told.textContent = "";
  } catch (error) {
    if (own !== running) return;
    told.textContent = error instanceof Error ? error.message : String(error);
    told.classList.add("wrong");
  }
}

async function fetched(signal: AbortSignal): Promise<Found> {
  const [text, other, farther] = fields.map(([, area]) => area.value);
  const body = JSON.stringify({ text, ...(other && { other }), ...(farther && { rather_than: farther }) });
  let reply: Response;
  try {
    reply = await fetch("page", { method: "POST", headers: { "Content-Type": "application/json" }, body, signal });
  } catch {
    throw new Error("The server did not answer. Is it still running?");
  }
  if (reply.ok) return (await reply.json()) as Found;
  const { error } = (await reply.json().catch(() => ({}))) as { error?: string };
  throw new Error(error ?? `The server answered with ${reply.status}.`);
}

if (typeof DecompressionStream === "undefined") {
  root.textContent = "This browser cannot inflate the maps: use a version from 2023 or later.";
}
