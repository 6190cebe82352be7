// Lists the operations of openapi.json, and sends requests to them. Everything from the document is inserted as text.
"use strict";

const MAX_SHOWN = 20000; // characters of a response
const MAX_LEVELS = 5; // of nested schemas
let api;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function resolve(schema) {
  if (!schema || !schema.$ref) return schema || {};
  const { $ref, ...rest } = schema;
  const target = $ref.split("/").slice(1).reduce((node, part) => node[part], api);
  const described = Object.fromEntries(Object.entries(rest).filter(([, value]) => value !== ""));
  return { ...resolve(target), ...described };
}

function typeOf(schema) {
  const found = resolve(schema);
  if (found.enum) return found.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (found.anyOf) return [...new Set(found.anyOf.map(typeOf))].join(" | ");
  if (found.type === "array") return `list of ${found.items ? typeOf(found.items) : "values"}`;
  return [found.type || "any"].flat().join(" | ");
}

function propertiesOf(schema) {
  const found = resolve(schema);
  if (found.properties) return found;
  if (found.items) return propertiesOf(found.items);
  return (found.anyOf || []).map(propertiesOf).find((option) => option) || null;
}

function schemaList(schema, level = 0) {
  const found = propertiesOf(schema);
  if (!found) return "";
  const list = element("ul");
  for (const [name, property] of Object.entries(found.properties)) {
    const resolved = resolve(property);
    const needed = (found.required || []).includes(name) && level >= 0 ? "" : ", optional";
    const item = element("li", {}, element("code", {}, name), " ",
      element("span", { class: "type" }, typeOf(property) + needed));
    if (resolved.description) item.append(element("div", { class: "about" }, resolved.description));
    if (level < MAX_LEVELS && propertiesOf(property)) item.append(lazyDetails("Fields", property, level + 1));
    list.append(item);
  }
  return list;
}

function lazyDetails(title, schema, level) {
  const details = element("details", { class: "schema" }, element("summary", {}, title));
  details.addEventListener("toggle", () => {
    if (details.childElementCount === 1) details.append(schemaList(schema, level));
  });
  return details;
}

function example(schema, level = 0) {
  const found = resolve(schema);
  if (found.default !== undefined && level > 0) return found.default;
  if (found.enum) return found.enum[0];
  if (found.anyOf) return example(found.anyOf[0], level + 1);
  if (found.type === "object") {
    const names = found.required || [];
    return Object.fromEntries(names.map((name) => [name, example(found.properties[name], level + 1)]));
  }
  if (found.type === "array") return [example(found.items, level + 1)];
  return { integer: 1, number: 1, boolean: false }[found.type] ?? "A man is playing a guitar.";
}

async function send(method, path, body, output, status) {
  const headers = body === null ? {} : { "Content-Type": "application/json" };
  const key = document.getElementById("key").value;
  if (key) headers.Authorization = `Bearer ${key}`;
  status.textContent = "Waiting for the response ...";
  output.textContent = "";
  try {
    const started = performance.now();
    const response = await fetch(`.${path}`, { method, headers, body });
    const text = await response.text();
    const seconds = ((performance.now() - started) / 1000).toFixed(2);
    status.textContent = `Status ${response.status} after ${seconds} s, ${text.length} characters`;
    output.textContent = pretty(text);
  } catch (error) {
    status.textContent = `The request failed: ${error.message}. Check that the server is running.`;
  }
}

function pretty(text) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch { /* not one JSON value, such as the lines of a stream */ }
  return shown.length > MAX_SHOWN ? `${shown.slice(0, MAX_SHOWN)}\n... (shortened)` : shown;
}

function operationForm(method, path, operation) {
  const id = operation.operationId;
  const output = element("pre", { tabindex: "0", "aria-label": "Response" });
  const status = element("p", { class: "facts", role: "status" });
  const inside = element("div", { class: "inside" });
  const schema = operation.requestBody?.content["application/json"]?.schema;
  const body = element("textarea", { id: `${id}_body`, spellcheck: "false" });
  const name = element("input", { id: `${id}_name` });
  if (operation.parameters) {
    inside.append(element("p", { class: "field" }, element("label", { for: name.id }, "name"), name));
  }
  if (schema) {
    body.value = JSON.stringify(example(schema), null, 2);
    inside.append(lazyDetails("Fields of the body", schema, 0));
    inside.append(element("div", { class: "field" }, element("label", { for: body.id }, "Body"), body));
  }
  const button = element("button", { class: "run", type: "button" }, "Send");
  button.addEventListener("click", async () => {
    button.disabled = true;
    const target = path.replace("{name}", encodeURIComponent(name.value));
    await send(method.toUpperCase(), target, schema ? body.value : null, output, status);
    button.disabled = false;
    button.focus();
  });
  const answer = Object.values(operation.responses["200"]?.content || {})[0]?.schema;
  inside.append(element("div", {}, button), status, output);
  if (propertiesOf(answer)) inside.append(lazyDetails("Fields of the response", answer, 0));
  return inside;
}

function operationDetails(method, path, operation) {
  const summary = element("summary", {}, element("span", { class: "method" }, method.toUpperCase()),
    element("code", {}, path), element("span", {}, operation.summary));
  const details = element("details", { class: "operation" }, summary);
  details.addEventListener("toggle", () => {
    if (details.childElementCount === 1) details.append(operationForm(method, path, operation));
  });
  return details;
}

async function start() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`openapi.json has status ${response.status}`);
  api = await response.json();
  document.getElementById("version").textContent = `version ${api.info.version}`;
  document.getElementById("key-field").hidden = !api.components.securitySchemes;
  const sections = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags[0];
      if (!sections.has(tag)) {
        sections.set(tag, element("section", { class: "part", "aria-label": tag }, element("h2", {}, tag)));
      }
      sections.get(tag).append(operationDetails(method, path, operation));
    }
  }
  document.getElementById("docs").append(...sections.values());
}

start().catch((error) => {
  document.getElementById("problem").textContent = `The routes cannot be listed: ${error.message}. Reload the page.`;
});
