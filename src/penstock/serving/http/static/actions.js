// Changes to the models, where server.management is on: the routes of the management API, with its token.
"use strict";

class Actions {
  // `instances` etc. of one model version; on the overview (no model), a form that loads one.
  constructor() {
    this.section = element("section", "", { class: "actions" });
    this.answer = element("p", "", { role: "status", "aria-live": "polite" });
    this.token = "";
    this.made = "";
  }

  async send(method, path, body) {
    this.answer.textContent = "Working ...";
    const headers = { "content-type": "application/json", ...(this.token || token ? { authorization: `Bearer ${this.token || token}` } : {}) };
    try {
      const response = await fetch(`/dashboard/models/${path}`, { method, headers, body: body && JSON.stringify(body) });
      const text = await response.text();
      if (response.ok) this.answer.textContent = "Done.";
      else if (response.status === 401) this.askToken(method, path, body);
      else this.answer.textContent = `${response.status}: ${text.slice(0, 1000)}`;
    } catch (error) {
      this.answer.textContent = `The server cannot be reached: ${error.message}`;
    }
  }

  askToken(method, path, body) {
    const field = element("input", "", { type: "password", autocomplete: "off", required: "" });
    const form = this.form("Continue", () => {
      this.token = field.value;
      this.send(method, path, body);
    }, element("label", "Token of the management API ", {}, field));
    this.answer.replaceChildren(form);
    field.focus();
  }

  // Shows what so many instances bring, once the number has not changed for a moment.
  simulate(path, instances, effect) {
    clearTimeout(this.asked);
    effect.textContent = "";
    if (this.section.hidden || !(instances >= 1)) return;
    this.asked = setTimeout(async () => {
      const headers = token ? { authorization: `Bearer ${token}` } : {};
      const response = await fetch(`/dashboard/effects/${path}/${Number(instances)}`, { headers }).catch(() => ({}));
      const found = response.ok ? await response.json() : null;
      effect.textContent = found ? said(found) : "the effect is not known: too few batches yet, or too short ones";
      if (!found && effect.offsetParent) this.asked = setTimeout(() => this.simulate(path, instances, effect), 5000); // they come
    }, 300);
  }

  form(action, submit, ...children) {
    const form = element("form", "", {}, ...children, " ", element("button", action));
    form.onsubmit = (event) => {
      event.preventDefault();
      submit();
    };
    return form;
  }

  fields() {
    return [...this.section.querySelectorAll("button, input")];
  }

  field(label, attributes) {
    const input = element("input", "", attributes);
    return [input, element("label", `${label} `, {}, input)];
  }

  load() {
    const [name, a] = this.field("Name", { required: "", size: 12 });
    const [version, b] = this.field("Version", { value: "1", size: 3, required: "" });
    const [target, c] = this.field("Target", { placeholder: "app.py:Model", required: "", size: 24 });
    const path = () => [name, version].map((input) => encodeURIComponent(input.value)).join("/");
    const form = this.form("Load", () => this.send("PUT", path(), { target: target.value }), a, " ", b, " ", c);
    this.section.replaceChildren(element("h2", "Load a model"), form, this.answer);
  }

  show(model, detail) {
    const versions = detail.versions;
    this.inFlight = detail.in_flight;
    const made = JSON.stringify([model.name, model.version, model.state, model.instances, versions]);
    if (made === this.made) { // else the fields would lose what is typed
      this.explain?.();
      return;
    }
    if (this.name !== model.name) this.answer.textContent = "";
    this.name = model.name;
    this.made = made;
    const path = encodeURIComponent(model.name);
    const own = `${path}/${encodeURIComponent(model.version)}`;
    const [instances, label] = this.field("Instances", { type: "number", min: 1, max: 999, value: model.instances, required: "" });
    const effect = element("span", "", { class: "effect" });
    this.explain = () => (this.drainText.textContent = this.drain());
    instances.oninput = () => this.simulate(own, instances.value, effect);
    this.simulate(own, instances.value, effect);
    const forms = [this.form("Scale", () => this.send("PUT", `${own}/scale`, { instances: Number(instances.value) }), label)];
    forms[0].append(" ", effect);
    if (versions.length > 1) {
      const rate = `all requests without a version then go to version ${model.version}`;
      const form = this.form("Make it the default", () => this.send("PUT", `${path}/default`, { version: model.version }));
      form.append(" ", element("span", rate, { class: "effect" }));
      forms.push(form);
      const shares = versions.map(([version, , share]) => [version, ...this.field(`Version ${version}, %`, { type: "number", min: 0, max: 100, value: Math.round(share * 100), required: "" })]);
      forms.push(this.form("Split traffic", () => {
        const weights = Object.fromEntries(shares.map(([version, input]) => [version, Number(input.value) / 100]));
        this.send("PUT", `${path}/traffic`, weights);
      }, ...shares.map(([, , labelled]) => labelled)));
    }
    const drained = model.state === "DRAINED";
    const drain = this.form(drained ? "Resume" : "Drain", () => this.send("PUT", `${own}/drain`, { drained: !drained }));
    this.drain = drained ? () => "The version gets its requests again." : () => `New requests go to other versions, those that name version ${model.version} are refused; waits for the ${count(this.inFlight)} in flight, and keeps the instances.`;
    this.drainText = element("span", "", { class: "effect" });
    drain.append(" ", this.drainText);
    forms.push(versions.length > 1 || drained ? drain : element("p", "Drain: needs another version that answers; load one first.", { class: "effect" }));
    const [sure, confirm] = this.field("", { type: "checkbox", required: "" });
    confirm.append(" accepted requests are answered first, others get an error ");
    forms.push(this.form("Unload", () => sure.checked && this.send("DELETE", own), confirm));
    const at = this.fields().indexOf(document.activeElement);
    this.section.replaceChildren(element("h3", "Actions"), ...forms, this.answer);
    this.fields()[at]?.focus(); // else a keyboard would begin again at the top of the page
    this.explain();
  }
}

// What another number of instances changes, as the server simulates it with the learned cost of its batches.
function said({ now, then }) {
  const busy = (of) => `each instance ${Math.round(100 * of.busy)} % busy`;
  const load = then.p99_s ? `at the present load p99 ${seconds(then.p99_s)}, now ${now.p99_s ? seconds(now.p99_s) : "without bound"}, ${busy(then)}`
    : then.busy ? "too few for the present load: the queue would grow" : "no load now";
  return `simulated: capacity ${count(then.capacity)} rows/s, now ${count(now.capacity)}; ${load}; if processors or memory are free`;
}
