// The form of a server's page with its examples and errors, for all types of models.
// The URL fragment contains the texts and the selection, so a view can be shared, reloaded and navigated back to.
import { AttnlensError } from "../../../client/typescript/src/errors";
import type { TransportOptions } from "../../../client/typescript/src/transport";
import { element, newId } from "../dom";
import { Field, type FieldOptions } from "./field";

export interface Model {
  name: string;
  num_layers: number;
  num_heads: number;
  max_tokens: number;
  can_explain: boolean;
  labels: string[];
  takes_pairs: boolean;
  comparison: string;
}

/** Texts of the form by field name. Empty fields are omitted. */
export type Texts = Record<string, string>;

/** Parameters of the URL fragment for a selection in the result, such as the selected head. Empty ones are removed. */
export type Selection = Record<string, string>;

/** Settings of requests to the server. */
export type Connection = Pick<TransportOptions, "apiKey" | "timeoutMs">;

/** A displayed result. */
export interface Result {
  title: string;
  ready: Promise<void>;
  close(): void; // stops drawing, before another result replaces this one
}

/** Draws a result, and stores its later selections with `store`. */
export type Draw = (root: HTMLElement, selected: URLSearchParams, store: (selection: Selection) => void) => Result;

/** The form of a type of model. */
export interface Form {
  lead: string;
  button: string;
  fields: [string, FieldOptions][];
  examples: [string, Texts][];
  compute(texts: Texts, connection: Connection, signal: AbortSignal): Promise<Draw>;
  /** Return the field of an error and the message for it, if the error has a field. */
  locate(error: AttnlensError): { name: string; message: string } | null;
}

/** An error of a field that the page itself detects. */
export class FieldError extends Error {
  constructor(
    readonly field: string,
    message: string,
  ) {
    super(message);
  }
}

const URL_DELAY_MS = 400; // browsers limit how often a page may change its URL
const TIMEOUT_MS = 90_000; // longer than the time limit of the server, whose message is better

export class LivePage {
  private readonly fields = new Map<string, Field>();
  private readonly status = element("p", { class: "status", role: "status" });
  private readonly element: HTMLFormElement;
  private readonly result = element("div");
  private readonly key: Field;
  private shown: Result | null = null;
  private request: AbortController | null = null;
  private timer = 0;

  constructor(
    private readonly root: HTMLElement,
    private readonly model: Model,
    private readonly form: Form,
  ) {
    const submit = (): void => this.element.requestSubmit();
    for (const [name, options] of form.fields) this.fields.set(name, new Field(options, submit));
    this.key = new Field({ label: "Key", hint: "Of this server. The page does not store it.", kind: "secret" }, submit);
    const button = element("button", { type: "submit", class: "toggle show" }, form.button);
    this.element = element(
      "form",
      { class: "live-form", autocomplete: "off", novalidate: true },
      ...[...this.fields.values()].map((field) => field.element),
      element("div", { class: "send" }, button, this.status),
    );
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    root.replaceChildren(element("div", { class: "attnlens live" }, this.header(), this.element, this.examples()), this.result);
    window.addEventListener("popstate", () => this.open());
    this.open();
  }

  private header(): HTMLElement {
    return element(
      "header",
      { class: "about-model" },
      element("p", { class: "brand" }, "attnlens"),
      element("h1", { dir: "auto" }, this.model.name),
      element("p", { class: "lead" }, this.form.lead),
      ...(this.model.comparison ? [element("p", { class: "lead" }, `The publisher's results: ${this.model.comparison}.`)] : []),
    );
  }

  private examples(): HTMLElement {
    const buttons = this.form.examples.map(([title, texts]) => {
      const lines = Object.values(texts).flatMap((text) => text.split("\n"));
      const quotes = lines.map((line) => element("q", {}, line));
      const button = element("button", { type: "button", class: "example" }, element("span", { class: "name" }, title), ...quotes);
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
    void this.show(new URLSearchParams());
  }

  /** Show the texts in the URL, or the start page. */
  private open(): void {
    const parameters = new URLSearchParams(window.location.hash.slice(1));
    this.fill(Object.fromEntries(parameters));
    const [first] = this.fields.keys();
    if (parameters.get(first)) void this.show(parameters);
    else this.reset();
  }

  private reset(): void {
    this.request?.abort();
    this.request = null;
    this.shown?.close();
    this.shown = null;
    window.clearTimeout(this.timer);
    this.result.replaceChildren();
    this.result.className = "";
    this.root.classList.remove("has-result");
    document.title = `${this.model.name} - attnlens`;
    this.setStatus("");
  }

  private async show(selected: URLSearchParams): Promise<void> {
    this.request?.abort();
    const request = (this.request = new AbortController());
    this.setStatus("Computing…");
    for (const field of [...this.fields.values(), this.key]) field.showError(null);
    try {
      const connection = { timeoutMs: TIMEOUT_MS, apiKey: this.key.value };
      const draw = await this.form.compute(this.texts(), connection, request.signal);
      if (request !== this.request) return;
      this.shown?.close();
      window.clearTimeout(this.timer);
      this.shown = draw(this.result, selected, (selection) => this.store(selection));
      document.title = `${this.shown.title} - ${this.model.name}`;
      await this.shown.ready;
      this.root.classList.add("has-result");
      this.setStatus("");
    } catch (error) {
      if (request === this.request) this.showError(error);
    }
  }

  /** Store the selection in the URL, after a short delay. */
  private store(selection: Selection): void {
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => {
      const parameters = new URLSearchParams(window.location.hash.slice(1));
      for (const [name, value] of Object.entries(selection)) {
        if (value === "") parameters.delete(name);
        else parameters.set(name, value);
      }
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
    if (needsKey) this.element.lastElementChild?.before(this.key.element);
    const place = error instanceof FieldError ? { name: error.field, message: error.message } : failure && this.form.locate(failure);
    const field = needsKey ? this.key : place && this.fields.get(place.name);
    const message = needsKey && !this.key.value ? "This server needs a key." : messageOf(field && place ? place.message : error);
    this.setStatus(field ? "" : message);
    this.status.classList.toggle("error", !field);
    field?.showError(message);
    field?.focus();
  }
}

/** Return the message of an error as a sentence. */
export function messageOf(error: unknown): string {
  if (typeof error !== "string" && !(error instanceof AttnlensError)) return String(error);
  const message = typeof error === "string" ? error : error.message;
  return `${message.charAt(0).toUpperCase()}${message.slice(1)}.`;
}
