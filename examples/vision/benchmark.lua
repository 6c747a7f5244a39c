-- wrk -t 4 -c 128 -d 20s --timeout 20s -s benchmark.lua http://127.0.0.1:5005/stream_predict
local image = assert(io.open("three.jpg", "rb"))
local mark = "----the-image"
wrk.method = "POST"
wrk.body = "--" .. mark .. "\r\n"
  .. 'Content-Disposition: form-data; name="file"; filename="three.jpg"\r\n'
  .. "Content-Type: image/jpeg\r\n\r\n"
  .. image:read("*a") .. "\r\n--" .. mark .. "--\r\n"
wrk.headers["Content-Type"] = "multipart/form-data; boundary=" .. mark
image:close()
