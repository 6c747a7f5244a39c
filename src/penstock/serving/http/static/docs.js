// Shows /openapi.json in Swagger UI, or as a plain list of operations if Swagger UI is not installed.
"use strict";

const form = document.querySelector("#token");
const field = form.querySelector("input");
const main = document.querySelector("#routes");
const problem = document.querySelector("#problem");

function element(name, text = "", parent = main) {
  const found = document.createElement(name);
  found.textContent = text;
  parent.append(found);
  return found;
}

function authorization(token) {
  return token ? { authorization: `Bearer ${token}` } : {};
}

function plainOperation(path, method, operation, token) {
  const details = element("details");
  element("summary", `${method.toUpperCase()} ${path}: ${operation.summary}`, details);
  const body = operation.requestBody?.content ?? {};
  for (const [kind, { schema }] of Object.entries(body)) {
    element("p", `Request, ${kind}:`, details);
    element("pre", JSON.stringify(schema, null, 2), details);
  }
  element("p", `Statuses: ${Object.keys(operation.responses).join(", ")}`, details);
  const kind = Object.keys(body)[0];
  const text = kind && element("textarea", "", details);
  const button = element("button", "Execute", details);
  const answer = element("pre", "", details);
  button.onclick = async () => {
    const headers = { ...authorization(token), ...(kind && { "content-type": kind }) };
    const response = await fetch(path.slice(1), { method: method.toUpperCase(), headers, body: text?.value });
    answer.textContent = `${response.status}\n${await response.text()}`;
  };
}

function plain(description, token) {
  element("h1", `${description.info.title} ${description.info.version}`);
  element("p", "This is a plain list. Install the extra 'swagger' for the page of Swagger UI.");
  for (const [path, operations] of Object.entries(description.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      plainOperation(path, method, operation, token);
    }
  }
  element("h2", "Types");
  element("pre", JSON.stringify(description.components.schemas, null, 2));
}

async function show(token) {
  problem.textContent = "";
  const response = await fetch("openapi.json", { headers: authorization(token) });
  form.hidden = response.status !== 401;
  if (!response.ok) {
    problem.textContent = response.status === 401 && !token ? "" : await response.text();
    return;
  }
  const spec = await response.json();
  spec.servers = [{ url: new URL(".", location.href).href }]; // a proxy may have added a prefix
  if (!window.SwaggerUIBundle) {
    plain(spec, token);
    return;
  }
  const onComplete = () => token && ui.preauthorizeApiKey("bearer", token);
  const ui = window.SwaggerUIBundle({ spec, domNode: main, deepLinking: true, validatorUrl: null, onComplete });
}

form.onsubmit = (event) => {
  event.preventDefault();
  show(field.value);
};
show("");
