// The page that a server hosts: a form with examples, and below it the views of the result.
// The URL fragment contains the texts and the head, so a view can be shared, reloaded and navigated back to.
import { AttnlensError } from "../../client/typescript/src/errors";
import { Transport } from "../../client/typescript/src/transport";
import { App } from "./app";
import type { PageData } from "./data";
import { element, newId } from "./dom";
import { fromBase64 } from "./maps";
import type { State } from "./state";

interface Model {
  name: string;
  num_layers: number;
  num_heads: number;
  max_tokens: number;
  can_explain: boolean;
}

interface Result {
  page: PageData;
  maps: string[]; // base64-encoded maps of each text and layer
}

type Name = "text" | "other" | "rather_than";
type Texts = Partial<Record<Name, string>>;

const URL_DELAY_MS = 400; // browsers limit how often a page may change its URL
const TIMEOUT_MS = 90_000; // longer than the time limit of the server, whose message is better

const EXAMPLES: [string, Texts][] = [
  ["One sentence", { text: "The animal didn't cross the street because it was too tired." }],
  ["Two similar sentences", { text: "A man is playing a guitar.", other: "Someone plays an instrument." }],
  [
    "A query and two results",
    {
      text: "How do I reset my password?",
      other: "I forgot my login credentials.",
      rather_than: "How do I reset my router?",
    },
  ],
];

class Field {
  readonly element: HTMLElement;
  private readonly input: HTMLTextAreaElement | HTMLInputElement;
  private readonly error = element("p", { class: "error", id: newId("error"), hidden: true });

  constructor(label: string, hint: string, submit: () => void, isSecret = false) {
    const [id, hintId] = [newId("field"), newId("hint")];
    const attributes = { id, "aria-describedby": `${this.error.id} ${hintId}` };
    this.input = isSecret
      ? element("input", { ...attributes, type: "password", autocomplete: "off" })
      : element("textarea", { ...attributes, rows: 2, dir: "auto", spellcheck: "false" });
    this.input.addEventListener("keydown", (event: Event) => {
      if (event instanceof KeyboardEvent && event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        submit();
      }
    });
    this.input.addEventListener("input", () => this.showError(null));
    this.element = element(
      "div",
      { class: "field" },
      element("label", { for: id }, label),
      this.input,
      this.error,
      element("p", { class: "hint", id: hintId }, hint),
    );
  }

  get value(): string {
    return this.input.value;
  }

  set value(text: string) {
    this.input.value = text;
  }

  showError(message: string | null): void {
    this.error.textContent = message ?? "";
    this.error.hidden = message === null;
    this.input.setAttribute("aria-invalid", String(message !== null));
  }

  focus(): void {
    this.input.focus();
  }
}

class Live {
  private readonly fields = new Map<Name, Field>();
  private readonly status = element("p", { class: "status", role: "status" });
  private readonly form: HTMLFormElement;
  private readonly result = element("div");
  private app: App | null = null;
  private request: AbortController | null = null;
  private readonly key: Field;
  private timer = 0;

  constructor(
    private readonly root: HTMLElement,
    private readonly model: Model,
  ) {
    const submit = (): void => this.form.requestSubmit();
    const add = (name: Name, label: string, hint: string): void => void this.fields.set(name, new Field(label, hint, submit));
    add("text", "Text", `Up to ${model.max_tokens} tokens.`);
    add("other", "Compare with", model.can_explain ? "Optional: which words make the two texts similar?" : "Optional.");
    if (model.can_explain) add("rather_than", "Rather than", "Optional: why is the text closer to the second than to this one?");
    this.key = new Field("Key", "Of this server. The page does not store it.", submit, true);
    const button = element("button", { type: "submit", class: "toggle show" }, "Show");
    this.form = element(
      "form",
      { class: "live-form", autocomplete: "off", novalidate: true },
      ...[...this.fields.values()].map((field) => field.element),
      element("div", { class: "send" }, button, this.status),
    );
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    root.replaceChildren(element("div", { class: "attnlens live" }, this.header(), this.form, this.examples()), this.result);
    window.addEventListener("popstate", () => this.open());
    this.open();
  }

  private header(): HTMLElement {
    const { name, num_layers: layers, num_heads: heads, can_explain: explains } = this.model;
    const attention = `what the ${layers * heads} attention heads of this model attend to.`;
    const lead = explains
      ? `See what each word of a text contributes to its embedding, and ${attention}`
      : `See ${attention} This server does not compute contributions.`;
    return element(
      "header",
      { class: "about-model" },
      element("p", { class: "brand" }, "attnlens"),
      element("h1", { dir: "auto" }, name),
      element("p", { class: "lead" }, lead),
    );
  }

  private examples(): HTMLElement {
    const usable = EXAMPLES.filter(([, texts]) => !texts.rather_than || this.fields.has("rather_than"));
    const buttons = usable.map(([title, texts]) => {
      const lines = Object.values(texts).map((text) => element("q", {}, text));
      const button = element("button", { type: "button", class: "example" }, element("span", { class: "name" }, title), ...lines);
      button.addEventListener("click", () => {
        this.fill(texts);
        this.submit();
      });
      return button;
    });
    const id = newId("examples");
    return element(
      "section",
      { class: "examples", "aria-labelledby": id },
      element("h2", { id, class: "label" }, "Examples"),
      ...buttons,
    );
  }

  private fill(texts: Texts): void {
    for (const [name, field] of this.fields) field.value = texts[name] ?? "";
  }

  private texts(): Texts {
    const filled = [...this.fields].filter(([, field]) => field.value !== "");
    return Object.fromEntries(filled.map(([name, field]) => [name, field.value]));
  }

  private submit(): void {
    const fragment = `#${new URLSearchParams(this.texts())}`;
    if (fragment !== window.location.hash) window.history.pushState(null, "", fragment);
    void this.show({});
  }

  /** Show the texts in the URL, or the start page. */
  private open(): void {
    const parameters = new URLSearchParams(window.location.hash.slice(1));
    this.fill(Object.fromEntries(parameters));
    if (parameters.get("text")) void this.show(headOf(parameters));
    else this.reset();
  }

  private reset(): void {
    this.request?.abort();
    this.request = null;
    this.app?.close();
    this.app = null;
    window.clearTimeout(this.timer);
    this.result.replaceChildren();
    this.result.className = "";
    this.root.classList.remove("has-result");
    document.title = `${this.model.name} - attnlens`;
    this.setStatus("");
  }

  private async show(start: Partial<State>): Promise<void> {
    this.request?.abort();
    const request = (this.request = new AbortController());
    this.setStatus("Computing…");
    for (const field of [...this.fields.values(), this.key]) field.showError(null);
    const transport = new Transport("", { timeoutMs: TIMEOUT_MS, apiKey: this.key.value });
    try {
      const { page, maps } = (await transport.request("page", this.texts(), request.signal)) as Result;
      if (request !== this.request) return;
      this.app?.close();
      window.clearTimeout(this.timer);
      const { layers } = page.texts[0];
      const source = { compressed: (text: number, layer: number) => fromBase64(maps[text * layers + layer]) };
      this.app = new App(this.result, page, source, { heading: "h2", start, changed: (state) => this.storeHead(state) });
      await this.app.refresh();
      this.root.classList.add("has-result");
      document.title = `${page.title} - ${this.model.name}`;
      this.setStatus("");
    } catch (error) {
      if (request === this.request) this.showError(error);
    }
  }

  /** Store the selected head in the URL, after a short delay. */
  private storeHead({ layer, head }: State): void {
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => {
      const parameters = new URLSearchParams(window.location.hash.slice(1));
      parameters.set("layer", String(layer));
      parameters.set("head", head === null ? "mean" : String(head));
      window.history.replaceState(null, "", `#${parameters}`);
    }, URL_DELAY_MS);
  }

  private setStatus(message: string): void {
    this.status.textContent = message;
    this.status.classList.remove("error");
  }

  /** Show an error next to the form field that it names, or next to the button. */
  private showError(error: unknown): void {
    const failure = error instanceof AttnlensError ? error : null;
    const needsKey = failure?.status === 401;
    if (needsKey) this.form.lastElementChild?.before(this.key.element);
    const message = needsKey && !this.key.value ? "This server needs a key." : failure ? sentence(failure.message) : String(error);
    const { field: name } = (failure?.body ?? {}) as { field?: Name };
    const field = needsKey ? this.key : name && this.fields.get(name);
    this.setStatus(field ? "" : message);
    this.status.classList.toggle("error", !field);
    field?.showError(message);
    field?.focus();
  }
}

function headOf(parameters: URLSearchParams): Partial<State> {
  const [layer, head] = ["layer", "head"].map((name) => parameters.get(name));
  if (layer === null || head === null) return {};
  return { layer: Number(layer), head: head === "mean" ? null : Number(head) };
}

function sentence(message: string): string {
  return `${message.charAt(0).toUpperCase()}${message.slice(1)}.`;
}

const root = document.getElementById("attnlens") as HTMLElement;
document.body.classList.add("attnlens-page");
if (typeof DecompressionStream === "undefined") {
  root.textContent = "This browser does not support DecompressionStream. Use a version from 2023 or later.";
} else {
  new Live(root, JSON.parse(root.dataset.model ?? "") as Model);
}
