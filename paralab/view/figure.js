// A plotly figure: plotly's own code, 5 MB of it, comes with a widget's first figure and is loaded
// once for the page. anywidget gives a figure two seconds to initialize; 5 MB, or four times these,
// take longer on a slow machine. So a figure is initialized at once, and drawn when the code is there.
const loaded = (globalThis["paralab plotly VERSION"] ??= {});
loaded.code ??= new Promise((done) => {
  loaded.done = done;
});

const load = async (text) => {
  if (!text || loaded.begun) return;
  loaded.begun = true;
  const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  loaded.done(await import(url));
  URL.revokeObjectURL(url);
};

// What the kernel says is kept until the figure is drawn, and reaches it in any case: a page that is
// busy for more than those two seconds, with the figures of other cells, would have anywidget turn
// away all of it for good. What it said before is lost then, so the kernel is told to say it again.
const listen = (model, drawn) => {
  if (!model?.set_state || !model.comm) return; // no page of Jupyter's own
  const { set_state } = model;
  model.set_state = (state) => drawn.then(() => set_state.call(model, state));
  drawn.then(() => delete model.set_state);
  const widget = Object.getPrototypeOf(Object.getPrototypeOf(model)); // anywidget's own is between
  model.comm.on_msg((message) => widget._handle_comm_msg.call(model, message));
  model.send({ listens: true });
};

// plotly fits a figure to its place when the window changes its size. Its place also changes when it
// is put on the page after it was drawn, and when a side bar opens. And plotly writes down the width
// that a figure has when it is updated, which would hold from then on: also if it is updated in the
// 100 ms that plotly takes before it fits a figure, so whether it fits is seen again afterwards.
const TRIES = 9;
const AGAIN_MS = 150;

const fit = (element) => {
  let next;
  const fitted = (tried = 0) => {
    const place = element.clientWidth;
    const drawn = element._fullLayout;
    if (!place || !drawn) return;
    const fits = Math.abs(place - drawn.width) <= 1;
    if (fits && !tried) return;
    // Where a legend's rows have become more or fewer, plotly draws it where it stood before: it is
    // drawn once more. plotly does so only for another width.
    if (fits) drawn.width -= 2;
    delete element.layout.width;
    element._responsiveChartHandler?.();
    clearTimeout(next);
    if (!fits && tried < TRIES) next = setTimeout(fitted, AGAIN_MS, tried + 1);
  };
  const begin = () => fitted();
  const observer = new ResizeObserver(begin);
  observer.observe(element);
  document.addEventListener("plotlywidget-after-render", begin);
  return () => {
    clearTimeout(next);
    observer.disconnect();
    document.removeEventListener("plotlywidget-after-render", begin);
  };
};

// A change of several traces has "_undefined_" for what stays as it is in one of them. plotly's views
// know that, but its model would keep the word, and a figure that is shown again lack what it had.
const known = (change) => {
  for (const values of Object.values(change?.style_data ?? {}))
    if (Array.isArray(values)) values.forEach((value, i) => value === "_undefined_" && delete values[i]);
  return change;
};

export default () => {
  let figure;
  let own;
  return {
    async initialize({ model, ...more }) {
      // Not at once: its five megabytes would hold the page while the two seconds run.
      setTimeout(() => load(model.get("_bundle")), 50);
      figure = loaded.code.then(async (code) => {
        const made = await code.default();
        // plotly's views listen to this model, and go on when they are off the page: they fail at each
        // change, which figures on the page then miss. So each listens to the model of its own `render`,
        // for anywidget ends that with the view.
        const on = (...what) => (own ?? model).on(...what);
        const get = (name) => (name === "_py2js_update" ? known(model.get(name)) : model.get(name));
        await made.initialize({ model: { ...model, on, get }, ...more });
        return made;
      });
      listen(await model.widget_manager.get_model(model.get("_own")), figure);
    },
    render(context) {
      let gone = false;
      let end;
      let unfit;
      figure.then((made) => {
        if (gone) return;
        own = context.model;
        end = made.render(context);
        own = undefined;
        unfit = fit(context.el);
      });
      return () => {
        gone = true;
        unfit?.();
        end?.();
      };
    },
  };
};
